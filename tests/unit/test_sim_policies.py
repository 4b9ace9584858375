"""The baselines, each against what its authors published (loadtests/sim/policies says where they differ)."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import LoadView
from gateway.routing.picker import NoEndpoint, PickInput
from gateway.routing.prefix_index import Match
from loadtests.sim.policies import POLICIES
from loadtests.sim.policies.approximate_tree import ApproximateTree
from loadtests.sim.policies.bounded_hash import BoundedHash
from loadtests.sim.policies.longest_match import LongestMatch
from loadtests.sim.policies.overlap_cost import OverlapCost
from loadtests.sim.policies.routing_policy import RoutingPolicy
from loadtests.sim.policies.weighted_scores import WeightedScores
from loadtests.sim.sim_request import SimRequest, scheme_of
from tests.support.simulated import trace_of

NAMES = ("a", "b", "c", "d")


def request_for(*block_ids: int, index: int = 0) -> SimRequest:
    trace = trace_of(block_ids)
    request = SimRequest(index, 0.0, trace.requests[0], 16)
    request.hash_blocks(scheme_of(trace))
    return request


def given(request: SimRequest, *, inflight: dict[str, int] | None = None, matches: dict[str, Match] | None = None,
          views: dict[str, dict[str, float]] | None = None, ratio: float = 0.0) -> PickInput:
    endpoints = [EndpointView(name, "e", **(views or {}).get(name, {})) for name in NAMES]
    return PickInput(endpoints, request.prompt_tokens, matches or {}, random_ratio=ratio,
                     loads={name: LoadView(count, 0, 0) for name, count in (inflight or {}).items()})


def chosen(policy: RoutingPolicy, request: SimRequest, state: PickInput) -> str:
    decision = policy.choose(state, request)
    assert not isinstance(decision, NoEndpoint)
    return decision.endpoint_id


def test_the_table_has_every_baseline() -> None:
    assert list(POLICIES) == ["headstart", "random", "round_robin", "least_load", "sglang", "consistent_hash",
                              "longest_match", "llm_d", "dynamo"]
    assert all(POLICIES[name]().name == name for name in POLICIES)


class TestSglang:
    def test_a_match_above_the_threshold_wins_and_below_it_the_smallest_tree(self) -> None:
        policy = ApproximateTree(cache_threshold=0.3)
        policy.booked(request_for(1, 2, 3, 4, 5), "b")
        half = request_for(1, 2, 3, 14, 15)
        assert chosen(policy, half, given(half)) == "b"
        fifth = request_for(1, 12, 13, 14, 15)
        assert chosen(policy, fifth, given(fifth)) != "b"

    def test_the_fleet_gate_turns_affinity_off_for_everybody(self) -> None:
        policy = ApproximateTree(balance_abs=64, balance_rel=1.5)
        known = request_for(1, 2, 3)
        policy.booked(known, "b")
        busy_elsewhere = given(known, inflight={"a": 70, "b": 6, "c": 5, "d": 6})
        assert chosen(policy, known, busy_elsewhere) == "c"
        assert chosen(policy, known, given(known, inflight={"a": 69, "b": 6, "c": 5, "d": 6})) == "b"

    def test_a_tree_forgets_tails_beyond_its_bound(self) -> None:
        policy = ApproximateTree(max_tree_tokens=4 * 16)
        policy.booked(request_for(1, 2, 3), "b")
        policy.booked(request_for(7, 8), "b")
        head = request_for(1, 2)
        assert chosen(policy, head, given(head)) == "b"  # 3, the tail, went


class TestConsistentHash:
    def test_a_prefix_keeps_its_endpoint(self) -> None:
        policy = BoundedHash()
        same = {chosen(policy, one, given(one)) for one in (request_for(5, tail) for tail in range(20))}
        assert len(same) == 1
        spread = Counter(chosen(policy, one, given(one)) for one in (request_for(first) for first in range(200)))
        assert set(spread) == set(NAMES)

    def test_an_endpoint_over_its_share_is_walked_past(self) -> None:
        policy, request = BoundedHash(load_factor=1.25), request_for(5)
        home = chosen(policy, request, given(request))
        others = [name for name in NAMES if name != home]
        at_bound = dict.fromkeys(others, 3) | {home: 4}  # bound 1.25 * 14 / 4 = 4.375
        assert chosen(policy, request, given(request, inflight=at_bound)) == home
        assert chosen(policy, request, given(request, inflight=at_bound | {home: 5})) != home

    def test_when_all_are_over_it_is_the_first_again(self) -> None:
        policy, request = BoundedHash(load_factor=0.5), request_for(5)
        home = chosen(policy, request, given(request))
        assert chosen(policy, request, given(request, inflight=dict.fromkeys(NAMES, 9))) == home


class TestLongestMatch:
    def test_the_deepest_match_wins_whatever_the_load(self) -> None:
        policy = LongestMatch()
        policy.booked(request_for(1, 2), "a")
        policy.booked(request_for(1, 2, 3), "b")
        request = request_for(1, 2, 3, 4)
        assert chosen(policy, request, given(request, inflight={"b": 1000}, ratio=0.99)) == "b"

    def test_among_equals_and_without_a_match_chance_decides(self) -> None:
        policy = LongestMatch()
        policy.booked(request_for(1, 2), "a")
        policy.booked(request_for(1, 2), "c")
        request, unknown = request_for(1, 2, 9), request_for(50)
        assert {chosen(policy, request, given(request, ratio=ratio)) for ratio in (0.1, 0.9)} == {"a", "c"}
        assert {chosen(policy, unknown, given(unknown, ratio=at / 4)) for at in range(4)} == set(NAMES)


class TestWeightedScores:
    def test_prefix_queue_and_usage_weigh_two_two_one(self) -> None:
        policy, request = WeightedScores(), request_for(1, 2, 3, 4)
        full = {"a": Match(4, 0)}
        # a: 2 * 64/65 + 0 + 1 = 2.97; b: 0 + 2 + 1 = 3
        assert chosen(policy, request, given(request, matches=full, views={"a": {"num_waiting": 5}})) != "a"
        # a: 2 * 64/65 + 2 * 0.5 + 1; the longest queue is d's
        queues = {"a": {"num_waiting": 5}, "d": {"num_waiting": 10}}
        assert chosen(policy, request, given(request, matches=full, views=queues)) == "a"

    def test_a_full_pool_costs_one(self) -> None:
        policy, request = WeightedScores(), request_for(1)
        used = {name: {"kv_usage_ratio": 0.9} for name in NAMES} | {"c": {"kv_usage_ratio": 0.1}}
        assert chosen(policy, request, given(request, views=used)) == "c"


class TestOverlapCost:
    def test_prefill_to_come_plus_decode_blocks(self) -> None:
        policy, request = OverlapCost(), request_for(1, 2, 3, 4)
        match = {"a": Match(4, 0)}
        assert chosen(policy, request, given(request, matches=match, ratio=0.9)) == "a"
        policy.booked(request, "a")  # now a has 1 token of prefill and 5 blocks under way
        assert chosen(policy, request, given(request, matches=match, ratio=0.9)) == "d"  # 1/16 * 2 + 10 > 65/16 + 5

    def test_prefill_counts_until_the_first_token_and_blocks_until_the_end(self) -> None:
        policy, first = OverlapCost(), request_for(1, 2, 3, 4, index=1)
        assert chosen(policy, first, given(first)) == "a"
        policy.booked(first, "a")
        second = request_for(9, index=2)
        assert chosen(policy, second, given(second)) == "b"
        policy.prefill_done(first, "a")
        assert chosen(policy, second, given(second)) == "b"
        policy.ended(first, "a")
        assert chosen(policy, second, given(second)) == "a"


@pytest.mark.parametrize("name", ["random", "round_robin", "least_load", "headstart"])
def test_the_servers_own_policies_decide_as_in_the_server(name: str) -> None:
    from gateway.routing.policies import policy_named

    request = request_for(1, 2)
    state = given(request, inflight={"a": 2, "b": 1}, matches={"b": Match(2, 0)}, ratio=0.4)
    assert POLICIES[name]().choose(state, request) == policy_named(name)(state)
