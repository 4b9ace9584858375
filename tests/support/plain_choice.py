"""What a pick must choose, found by pricing everybody."""

from __future__ import annotations

from gateway.routing.cost import TIE_RATIO, TIE_S
from gateway.routing.picker import RoutingDecision


def check_as_if_all_were_priced(decision: RoutingDecision, random_ratio: float) -> None:
    """AssertionError unless it is the cheapest, of ties the one with least to compute, of equal ones any one."""
    costs = decision.candidates
    best = min(cost.total_s for cost in costs)
    tied = [cost for cost in costs if cost.total_s <= best + TIE_RATIO * abs(best) + TIE_S]
    least = min(cost.uncached_tokens for cost in tied)
    tied = [cost for cost in tied if cost.uncached_tokens == least]
    assert decision.cost == tied[int(random_ratio * len(tied))]
