"""Routing decisions as a table, and short stories in which each decision changes the next one's input."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.load_ledger import Booking, LoadLedger, LoadView
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision, pick
from gateway.routing.policies import POLICIES, Policy
from gateway.routing.prefix_index import Match, PrefixIndex
from worker.protocol.block_hash import HashScheme, block_hashes

SCHEME = HashScheme(block_size=16, seed=b"seed", model="m", weights="w", tokenizer="t", template="",
                    kv_dtype="float32", exactness="fast")


def endpoint(endpoint_id: str, **changes: object) -> EndpointView:
    view = EndpointView(endpoint_id, epoch="1", models=frozenset({"m"}), prefill_tokens_per_s=1000.0,
                        decode_step_s=0.02)
    return replace(view, **changes)  # type: ignore[arg-type]


A, B, C = endpoint("a"), endpoint("b"), endpoint("c")


@dataclass(frozen=True)
class Case:
    """`expect`: (endpoint, reason, matched tokens), or the reason why there is none."""

    name: str
    given: PickInput
    expect: tuple[str, str, int] | str


def given(*endpoints: EndpointView, prompt_tokens: int = 1600, **rest: object) -> PickInput:
    rest.setdefault("matches", {})
    return PickInput(endpoints, prompt_tokens, model="m", **rest)  # type: ignore[arg-type]


CASES = [
    Case("nobody known", given(), "no_endpoints"),
    Case("another model", given(endpoint("a", models=frozenset({"n"}))), "unknown_model"),
    Case("none ready", given(endpoint("a", ready=False)), "not_ready"),
    Case("all draining", given(endpoint("a", draining=True), endpoint("b", ready=False)), "draining"),
    Case("a context too short is passed over", given(endpoint("a", max_context=100), B, context_tokens=101),
         ("b", "cold", 0)),
    Case("a context just long enough", given(endpoint("a", max_context=101), context_tokens=101), ("a", "cold", 0)),
    Case("every context too short: the longest says so, tried ones aside",
         given(endpoint("a", max_context=100), endpoint("b", max_context=90), context_tokens=200), ("a", "cold", 0)),
    Case("all failed this request", given(A, B, excluded=frozenset("ab")), "excluded"),
    Case("idle and cold: chance decides, low", given(A, B, C, random_ratio=0.0), ("a", "cold", 0)),
    Case("idle and cold: chance decides, high", given(A, B, C, random_ratio=0.999), ("c", "cold", 0)),
    Case("the holder", given(A, B, matches={"b": Match(50, 0)}), ("b", "prefix", 800)),
    Case("the longer match", given(A, B, matches={"a": Match(40, 0), "b": Match(60, 0)}), ("b", "prefix", 960)),
    Case("a speculative match counts", given(A, B, matches={"b": Match(10, 40)}), ("b", "prefix", 800)),
    Case("a full hit leaves one token", given(A, B, matches={"b": Match(100, 0)}), ("b", "prefix", 1599)),
    Case("a prompt of one token", given(A, B, prompt_tokens=1, matches={"b": Match(1, 0)}), ("a", "cold", 0)),
    Case("an empty prompt", given(A, prompt_tokens=0), ("a", "cold", 0)),
    Case("holder with a long queue: computing again is cheaper",
         given(A, B, matches={"b": Match(50, 0)}, loads={"b": LoadView(2, 3000, 0)}), ("a", "load", 0)),
    Case("holder with a short queue: waiting is cheaper",
         given(A, B, matches={"b": Match(50, 0)}, loads={"b": LoadView(1, 300, 0)}), ("b", "prefix", 800)),
    Case("holder with many streams", given(A, B, matches={"b": Match(10, 0)}, loads={"b": LoadView(32, 0, 0)}),
         ("a", "load", 0)),
    Case("the worker reports a queue that we did not send",
         given(A, endpoint("b", waiting_prefill_tokens=3000), matches={"b": Match(50, 0)}), ("a", "load", 0)),
    Case("ledger and report are one queue, not two: 700 tokens each do not outweigh 800 matched",
         given(A, endpoint("b", running_prefill_tokens=700), matches={"b": Match(50, 0)},
               loads={"b": LoadView(0, 700, 0)}), ("b", "prefix", 800)),
    Case("a retry says so", given(A, B, matches={"b": Match(50, 0)}, excluded=frozenset("b")), ("a", "retry", 0)),
    Case("a tie between waiting and computing: compute less", given(
        B, A, expected_output_tokens=76, matches={"a": Match(0, 100)}, loads={"a": LoadView(1, 1600, 0)}),
        ("a", "prefix", 1599)),
    Case("no hash for this prompt", given(A, B, matches=None, loads={"a": LoadView(1, 0, 0)}), ("b", "degraded", 0)),
    Case("an engine whose cache we cannot see", given(endpoint("a", knowledge=Knowledge.NONE)), ("a", "degraded", 0)),
    Case("the session tips a tie", given(A, B, session_endpoint_id="b"), ("b", "session", 0)),
    Case("the session outweighs no match", given(A, B, session_endpoint_id="b", matches={"a": Match(10, 0)}),
         ("a", "prefix", 160)),
    Case("a match in the session is a prefix", given(A, B, session_endpoint_id="b", matches={"b": Match(50, 0)}),
         ("b", "prefix", 800)),
    Case("a price is bounded: a cold start of 10 s is worse",
         given(endpoint("a", price_s=1e9), B, prompt_tokens=10_000, matches={"a": Match(600, 0)}),
         ("a", "prefix", 9600)),
    Case("a price tips equal endpoints", given(endpoint("a", price_s=0.5), B), ("b", "cold", 0)),
    Case("a full pool: one where blocks are free", given(
        endpoint("a", blocks_total=1000, blocks_cached=1000), endpoint("b", blocks_total=1000, blocks_free=1000)),
        ("b", "cold", 0)),
    Case("a pool in use is worse than a pool of cached blocks", given(
        endpoint("a", blocks_total=1000), endpoint("b", blocks_total=1000, blocks_cached=1000)), ("b", "cold", 0)),
    Case("the faster of two", given(endpoint("a", prefill_tokens_per_s=500.0), B), ("b", "cold", 0)),
    Case("nobody has measured rates", given(
        endpoint("a", prefill_tokens_per_s=0.0, decode_step_s=0.0),
        endpoint("b", prefill_tokens_per_s=0.0, decode_step_s=0.0), matches={"b": Match(50, 0)}),
        ("b", "prefix", 800)),
    Case("a newcomer without rates is no faster than the rest", given(
        A, endpoint("b", prefill_tokens_per_s=0.0, decode_step_s=0.0), matches={"a": Match(5, 0)}),
        ("a", "prefix", 80)),
    Case("block sizes differ: tokens decide, not blocks", given(
        endpoint("a", block_size=784), B, matches={"a": Match(2, 0), "b": Match(50, 0)}), ("a", "prefix", 1568)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    decision = pick(case.given)
    if isinstance(decision, NoEndpoint):
        assert decision.reason == case.expect
        return
    assert (decision.endpoint_id, decision.reason, decision.matched_tokens) == case.expect


@pytest.mark.parametrize("prefill", [1e-6, 0.0, 4000.0, 1e12])
@pytest.mark.parametrize("step", [0.0, 1e-9, 1e6])
def test_rates_that_are_all_wrong_alike_leave_a_sane_order(prefill: float, step: float) -> None:
    """Least work first: a hit before a queue before both cold and queued."""
    fleet = [endpoint(name, prefill_tokens_per_s=prefill, decode_step_s=step) for name in "abc"]
    loads = {"b": LoadView(1, 1200, 0), "c": LoadView(1, 1200, 0)}
    decision = pick(given(*fleet, matches={"a": Match(50, 0), "b": Match(50, 0)}, loads=loads))
    assert isinstance(decision, RoutingDecision)
    totals = {cost.endpoint_id: cost.total_s for cost in decision.candidates}
    assert decision.endpoint_id == "a"
    assert totals["a"] < totals["b"] < totals["c"]


class Fleet:
    """A gateway's routing state without a gateway: pick, book and speculate as one step."""

    def __init__(self, *endpoints: EndpointView, policy: Policy = pick) -> None:
        self.endpoints = endpoints
        self.index = PrefixIndex(1 << 30)
        self.ledger = LoadLedger()
        self.policy = policy
        self.num_requests = 0

    def send(self, token_ids: list[int]) -> tuple[RoutingDecision, Booking]:
        hashes = block_hashes(token_ids, SCHEME)
        self.num_requests += 1
        decision = self.policy(PickInput(
            self.endpoints, len(token_ids), matches=self.index.match(hashes, 0.0), loads=self.ledger.loads(),
            model="m", random_ratio=self.num_requests * 0.618 % 1, turn=self.num_requests))
        assert isinstance(decision, RoutingDecision)
        self.index.speculate(decision.endpoint_id, hashes, 5.0)
        return decision, self.ledger.book(decision.endpoint_id, "1", prefill_tokens=decision.uncached_tokens,
                                          context_tokens=len(token_ids))

    def serve(self, token_ids: list[int]) -> RoutingDecision:
        """Send it, and let it be answered: its blocks are stored, its load is gone."""
        decision, booking = self.send(token_ids)
        self.index.store(decision.endpoint_id, block_hashes(token_ids, SCHEME))
        booking.release()
        return decision


def prompt(first_token: int, num_tokens: int) -> list[int]:
    return list(range(first_token, first_token + num_tokens))


def test_chats_with_one_system_prompt_stay_on_its_holder_at_balanced_load() -> None:
    fleet = Fleet(A, B)
    system = prompt(0, 800)
    holder = fleet.serve(system + prompt(10_000, 40)).endpoint_id
    for number in range(20):
        fleet.serve(prompt(100_000 + 1000 * number, 400))
        decision = fleet.serve(system + prompt(20_000 + 100 * number, 40))
        assert (decision.endpoint_id, decision.reason, decision.matched_tokens) == (holder, "prefix", 800)


def test_chats_stay_on_the_holder_while_others_are_streaming_everywhere() -> None:
    fleet = Fleet(A, B)
    system = prompt(0, 800)
    holder = fleet.serve(system).endpoint_id
    for number in range(6):
        fleet.send(prompt(100_000 + 1000 * number, 200))[1].prefill_done()
    for number in range(20):
        assert fleet.serve(system + prompt(20_000 + 100 * number, 40)).endpoint_id == holder


@pytest.mark.parametrize("num_endpoints", [2, 4, 8])
def test_one_hot_prefix_with_many_in_flight_spreads_evenly(num_endpoints: int) -> None:
    fleet = Fleet(*(endpoint(f"w{number}") for number in range(num_endpoints)))
    hot = prompt(0, 1600)
    fleet.serve(hot)
    computed: Counter[str] = Counter()  # whoever holds it already has less to compute, and so takes more requests
    for number in range(32 * num_endpoints):
        decision = fleet.send(hot + prompt(50_000 + 100 * number, 64))[0]
        computed[decision.endpoint_id] += decision.uncached_tokens
    assert len(computed) == num_endpoints
    assert max(computed.values()) <= 1.15 * sum(computed.values()) / num_endpoints


def test_identical_prompts_at_once_are_computed_once_per_worker_at_most() -> None:
    fleet = Fleet(A, B)
    decisions = [fleet.send(prompt(0, 2000))[0] for _ in range(16)]
    assert sum(decision.uncached_tokens for decision in decisions) <= 2.2 * 2000
    assert sum(decision.matched_tokens == 0 for decision in decisions) <= 2


def test_without_sharing_the_load_is_that_of_least_load() -> None:
    spreads = {}
    for name in ("headstart", "least_load"):
        fleet = Fleet(A, B, C, policy=POLICIES[name])
        open_bookings: list[Booking] = []
        for number in range(300):
            open_bookings.append(fleet.send(prompt(10_000 * number, 400))[1])
            if len(open_bookings) > 24:
                open_bookings.pop(0).release()
        spreads[name] = sorted(fleet.ledger.load(view.endpoint_id).num_inflight for view in fleet.endpoints)
    assert spreads["headstart"] == spreads["least_load"]


def test_a_newcomer_without_rates_is_not_flooded() -> None:
    newcomer = endpoint("c", prefill_tokens_per_s=0.0, decode_step_s=0.0)
    fleet = Fleet(A, B, newcomer)
    landed = Counter(fleet.send(prompt(10_000 * number, 400))[0].endpoint_id for number in range(30))
    assert landed == {"a": 10, "b": 10, "c": 10}


def test_round_robin_and_random_ignore_caches() -> None:
    for name in ("round_robin", "random"):
        fleet = Fleet(A, B, policy=POLICIES[name])
        landed = Counter(fleet.serve(prompt(0, 800)).endpoint_id for _ in range(40))
        assert landed.keys() == {"a", "b"}
        assert min(landed.values()) >= 15
