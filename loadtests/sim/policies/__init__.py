"""Policies by name: the server's own, and small faithful ones of other routers to compare with."""

from __future__ import annotations

from collections.abc import Callable

from loadtests.sim.policies.approximate_tree import ApproximateTree
from loadtests.sim.policies.bounded_hash import BoundedHash
from loadtests.sim.policies.longest_match import LongestMatch
from loadtests.sim.policies.overlap_cost import OverlapCost
from loadtests.sim.policies.routing_policy import RoutingPolicy, ServerPolicy
from loadtests.sim.policies.weighted_scores import WeightedScores

POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "headstart": lambda: ServerPolicy("headstart", uses_index=True),
    "random": lambda: ServerPolicy("random", uses_index=False),
    "round_robin": lambda: ServerPolicy("round_robin", uses_index=False),
    "least_load": lambda: ServerPolicy("least_load", uses_index=False),
    "sglang": ApproximateTree,
    "consistent_hash": BoundedHash,
    "longest_match": LongestMatch,
    "llm_d": WeightedScores,
    "dynamo": OverlapCost,
}
