"""What holds for every decision, whatever the fleet looks like."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from gateway.routing.cost import TIE_RATIO, TIE_S, CandidateCost, Rates, Work, candidate_cost, least_costs
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.load_ledger import LoadView
from gateway.routing.memory_wait import Stream
from gateway.routing.output_length import OutputLength
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision, pick
from gateway.routing.policies import POLICIES
from gateway.routing.prefix_index import Match
from tests.support.plain_choice import check_as_if_all_were_priced

counts = st.integers(0, 64)
tokens = st.integers(0, 100_000)
ratios = st.floats(0, 1, exclude_max=True)
loads = st.builds(LoadView, counts, tokens, tokens, counts, tokens)
streams = st.lists(st.builds(Stream, tokens, tokens, st.integers(1, 4096), st.none() | st.floats(-100, 0)),
                   max_size=5)
# Slow blocks are some of the confirmed ones.
matches = st.integers(0, 400).flatmap(lambda confirmed: st.builds(
    Match, st.just(confirmed), st.integers(0, 50), st.just(0) | st.integers(0, confirmed)))
views = st.builds(
    EndpointView, endpoint_id=st.sampled_from("abcdefgh"), epoch=st.just("1"), models=st.just(frozenset({"m"})),
    ready=st.booleans(), draining=st.booleans(), knowledge=st.sampled_from(Knowledge),
    block_size=st.sampled_from([1, 16, 784]), prefill_tokens_per_s=st.sampled_from([0.0, 400.0, 20_000.0]),
    decode_step_s=st.sampled_from([0.0, 0.01, 0.06]), blocks_total=st.sampled_from([0, 1000]),
    blocks_free=st.integers(0, 1000), blocks_cached=st.integers(0, 1000), num_running=counts, num_waiting=counts,
    waiting_prefill_tokens=tokens, running_prefill_tokens=tokens, decode_context_tokens=tokens,
    held_tokens_at_report=st.integers(0, 50_000), price_s=st.floats(-10, 10),
    others_ratio=st.just(0.0) | ratios, step_tokens=st.sampled_from([0, 16, 512]))
fleets = st.lists(views, max_size=8, unique_by=lambda view: view.endpoint_id)
inputs = st.builds(
    PickInput, endpoints=fleets, prompt_tokens=st.integers(0, 20_000), model=st.sampled_from([None, "m", "other"]),
    matches=st.none() | st.dictionaries(st.sampled_from("abcdefgh"), matches),
    loads=st.dictionaries(st.sampled_from("abcdefgh"), loads), expected_output_tokens=st.integers(0, 4096),
    excluded=st.frozensets(st.sampled_from("abcdefgh"), max_size=3),
    session_endpoint_id=st.none() | st.sampled_from("abcdefgh"), random_ratio=ratios, turn=st.integers(0, 1000),
    stretch=st.floats(1, 20), streams_of=st.dictionaries(st.sampled_from("abcdefgh"), streams).map(
        lambda there: lambda name: there.get(name, ())),
    busy_step_of=st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 2)).map(
        lambda seen: lambda name, num_active: seen.get(name, 0.0)))


def work_of(prompt_tokens: int, output_tokens: int, shared_ratio: float, there: Sequence[Stream] = ()) -> Work:
    return Work(prompt_tokens, output_tokens, 0.0, shared_ratio, 2.0, lambda _: there)


def may_serve(given: PickInput) -> set[str]:
    return {view.endpoint_id for view in given.endpoints if view.ready and not view.draining
            and view.endpoint_id not in given.excluded and given.model in (None, *view.models)}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(given_=inputs)
def test_every_policy_chooses_an_eligible_endpoint_or_says_why_there_is_none(name: str, given_: PickInput) -> None:
    decision = POLICIES[name](given_)
    allowed = may_serve(given_)
    if not allowed:
        assert isinstance(decision, NoEndpoint)
        assert not decision
        assert decision.message
        return
    assert isinstance(decision, RoutingDecision)
    assert decision.endpoint_id in allowed
    assert 0 <= decision.matched_tokens <= max(0, given_.prompt_tokens - 1)
    assert decision.match_confirmed_tokens + decision.match_speculative_tokens == decision.matched_tokens
    assert decision.uncached_tokens == max(1, given_.prompt_tokens - decision.matched_tokens)
    assert POLICIES[name](given_) == decision


@settings(max_examples=80, deadline=None)
@given(given_=inputs)
def test_the_choice_is_within_a_tie_of_the_cheapest_and_explains_itself(given_: PickInput) -> None:
    decision = pick(given_)
    assume(isinstance(decision, RoutingDecision))
    assert isinstance(decision, RoutingDecision)
    totals = [cost.total_s for cost in decision.candidates]
    chosen = next(cost for cost in decision.candidates if cost.endpoint_id == decision.endpoint_id)
    assert {cost.endpoint_id for cost in decision.candidates} == may_serve(given_)
    assert chosen.total_s <= min(totals) + TIE_RATIO * abs(min(totals)) + TIE_S
    assert chosen.matched_tokens == decision.matched_tokens
    for cost in decision.candidates:
        assert cost.total_s == pytest.approx(sum(terms(cost)))
        assert all(term >= 0 for term in terms(cost)[:-1])


@settings(max_examples=200, deadline=None)
@given(given_=inputs)
def test_the_choice_is_as_if_every_endpoint_had_been_priced(given_: PickInput) -> None:
    decision = pick(given_)
    assume(isinstance(decision, RoutingDecision))
    assert isinstance(decision, RoutingDecision)
    check_as_if_all_were_priced(decision, given_.random_ratio)
    assert decision.most_matched_tokens == max(cost.matched_tokens for cost in decision.candidates)


@settings(max_examples=100, deadline=None)
@given(view=views, match=matches, load=loads, in_session=st.booleans(),
       work=st.builds(work_of, st.integers(0, 20_000), st.integers(0, 4096), ratios, streams))
def test_no_cost_is_below_the_least(view: EndpointView, match: Match, load: LoadView, in_session: bool,
                                    work: Work) -> None:
    name = view.endpoint_id
    [least], most = least_costs([view], {name: match}, {name: load}, work, rates=Rates(),
                                session=name if in_session else None)
    cost = candidate_cost(view, match, load, work, rates=Rates(), in_session=in_session)
    assert least <= cost.total_s
    assert most == cost.matched_tokens


def terms(cost: CandidateCost) -> tuple[float, ...]:
    return (cost.prefill_s, cost.tier_s, cost.queue_s, cost.steps_s, cost.room_s, cost.doubt_s, cost.others_s,
            cost.evict_s, cost.price_s, -cost.session_s)


@settings(max_examples=80, deadline=None)
@given(given_=inputs)
def test_the_order_of_endpoints_changes_no_cost(given_: PickInput) -> None:
    decision = pick(given_)
    assume(isinstance(decision, RoutingDecision))
    assert isinstance(decision, RoutingDecision)
    turned = pick(structs.replace(given_, endpoints=list(reversed(given_.endpoints))))
    assert isinstance(turned, RoutingDecision)
    # Unknown rates are the mean of the others, summed in another order: equal up to rounding.
    costs = {cost.endpoint_id: cost.total_s for cost in turned.candidates}
    assert costs == pytest.approx({cost.endpoint_id: cost.total_s for cost in decision.candidates})


@settings(max_examples=80, deadline=None)
@given(view=views, match=matches, load=loads, more=st.integers(1, 1000),
       work=st.builds(work_of, st.integers(1, 20_000), st.integers(0, 4096), ratios))
def test_more_cache_never_costs_more_and_more_load_never_costs_less(
        view: EndpointView, match: Match, load: LoadView, more: int, work: Work) -> None:
    def total(view: EndpointView, match: Match, load: LoadView) -> float:
        return candidate_cost(view, match, load, work, rates=Rates()).total_s

    base = total(view, match, load)
    slack = 1e-9 * abs(base)
    confirmed, speculative, slow = match
    assert total(view, Match(confirmed + more, speculative, slow), load) <= base + slack
    assert total(view, Match(confirmed, speculative + more, slow), load) <= base + slack
    assert total(view, Match(confirmed, speculative), load) <= base + slack
    known = total(view, Match(confirmed, 0, slow), load)
    assert total(view, Match(confirmed + more, 0, slow + more), load) <= known + 1e-9 * abs(known)
    assert total(view, match, load._replace(num_inflight=load.num_inflight + more)) >= base - slack
    assert total(view, match, load._replace(queued_prefill_tokens=load.queued_prefill_tokens + more)) >= base - slack
    longer_queue = replace(view, waiting_prefill_tokens=view.waiting_prefill_tokens + more)
    assert total(longer_queue, match, load) >= base - slack
    assert total(view, match, load._replace(held_tokens=load.held_tokens + more)) >= base - slack
    assert total(replace(view, blocks_free=view.blocks_free + more), match, load) <= base + slack


@given(st.floats(0, 20), st.sampled_from([None, 16, 4000]))
def test_before_any_answer_has_ended_nobody_waits_for_a_full_pool_beside_an_idle_endpoint(
        ago_s: float, max_tokens: int | None) -> None:
    outputs, now = OutputLength(), 100.0
    full, idle = (EndpointView(name, "1", block_size=64, prefill_tokens_per_s=28_000.0, decode_step_s=0.0057,
                               blocks_total=130, blocks_free=free, num_running=running)
                  for name, free, running in (("full", 0, 1), ("idle", 130, 0)))
    running = Stream(8000, 8000, outputs.expected("m"), now - ago_s)
    decision = pick(PickInput(
        [full, idle], 7100, {"full": Match(93, 0)}, {"full": LoadView(1, 0, 8000, 1, 8000)}, now=now,
        expected_output_tokens=outputs.expected("m", max_tokens), lengths=outputs.profile("m"), shared_ratio=0.5,
        streams_of=lambda name: [running] * (name == "full")))
    assert isinstance(decision, RoutingDecision)
    assert decision.endpoint_id == "idle"
