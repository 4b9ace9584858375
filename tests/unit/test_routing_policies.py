"""The baselines and the policy table."""

from __future__ import annotations

import pytest

from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import LoadView
from gateway.routing.picker import PickInput, RoutingDecision
from gateway.routing.policies import POLICIES, policy_named

ENDPOINTS = tuple(EndpointView(name, "1") for name in "abc")


def chosen(policy: str, **rest: object) -> str:
    decision = policy_named(policy)(PickInput(ENDPOINTS, 100, **rest))  # type: ignore[arg-type]
    assert isinstance(decision, RoutingDecision)
    return decision.endpoint_id


def test_the_names_are_those_of_the_command_line() -> None:
    assert list(POLICIES) == ["headstart", "round_robin", "least_load", "random"]
    with pytest.raises(ValueError, match="unknown policy 'best': use one of headstart, round_robin"):
        policy_named("best")


def test_round_robin_takes_turns() -> None:
    assert [chosen("round_robin", turn=turn) for turn in range(5)] == ["a", "b", "c", "a", "b"]


def test_random_follows_the_number_given() -> None:
    assert [chosen("random", random_ratio=ratio) for ratio in (0.0, 0.34, 0.67, 0.999999)] == ["a", "b", "c", "c"]


def test_least_load_counts_requests_then_queued_tokens() -> None:
    assert chosen("least_load", loads={"a": LoadView(2, 0, 0), "b": LoadView(1, 0, 0), "c": LoadView(1, 5, 0)}) == "b"
    assert chosen("least_load", loads={"a": LoadView(1, 0, 0)}, random_ratio=0.9) == "c"


def test_a_retry_says_so_under_every_policy() -> None:
    for policy in POLICIES.values():
        decision = policy(PickInput(ENDPOINTS, 100, excluded=frozenset({"a", "b"})))
        assert isinstance(decision, RoutingDecision)
        assert (decision.endpoint_id, decision.reason) == ("c", "retry")
