"""What a pick must choose, found by pricing everybody."""

from __future__ import annotations

from gateway.routing.cost import TIE_RATIO, TIE_S
from gateway.routing.picker import RoutingDecision
from gateway.routing.unseen_work import width_s


def check_as_if_all_were_priced(decision: RoutingDecision, random_ratio: float) -> None:
    """AssertionError unless it is the cheapest, of ties the one with least to compute, of equal ones any one; or one
    that others' unseen requests leave as good as these."""
    costs = decision.candidates
    assert decision.considered is not None
    unseen_requests = decision.considered[0].unseen_requests
    if unseen_requests:
        _check_as_if_poured_over_all(decision, random_ratio, unseen_requests)
        return
    best = min(cost.total_s for cost in costs)
    tied = [cost for cost in costs if cost.total_s <= best + TIE_RATIO * abs(best) + TIE_S]
    least = min(cost.uncached_tokens for cost in tied)
    tied = [cost for cost in tied if cost.uncached_tokens == least]
    assert decision.cost == tied[int(random_ratio * len(tied))]


def _check_as_if_poured_over_all(decision: RoutingDecision, random_ratio: float, unseen_requests: float) -> None:
    costs = sorted(decision.candidates, key=lambda cost: cost.total_s)
    widths = [width_s(cost, unseen_requests) for cost in costs]
    low, high = costs[0].total_s, costs[0].total_s + widths[0]
    for _ in range(100):
        level = (low + high) / 2
        poured = sum(max(0.0, level - cost.total_s) / width for cost, width in zip(costs, widths, strict=True))
        low, high = (level, high) if poured < 1 else (low, level)
    before = 0.0
    for cost, width in zip(costs, widths, strict=True):
        after = before + max(0.0, high - cost.total_s) / width
        if cost == decision.cost:
            assert before - 1e-6 <= random_ratio <= after + 1e-6
            return
        before = after
    raise AssertionError("it chose nobody's cost")
