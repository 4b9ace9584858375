"""What a pick must choose, found by pricing everybody."""

from __future__ import annotations

from gateway.routing.cost import REST_TIE_RATIO, TIE_RATIO, TIE_S
from gateway.routing.load_ledger import NO_LOAD
from gateway.routing.picker import PickInput, RoutingDecision
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
    is_at_rest = all_at_rest(decision.considered[0])
    best = min(cost.total_s for cost in costs)
    ratio = REST_TIE_RATIO if is_at_rest else TIE_RATIO
    tied = [cost for cost in costs if cost.total_s <= best + ratio * abs(best) + TIE_S]
    if is_at_rest:
        cheapest = min(tied, key=lambda cost: (cost.total_s, cost.evict_s + cost.price_s))
        memory_s = cheapest.evict_s + cheapest.price_s
        bound = memory_s + REST_TIE_RATIO * memory_s + TIE_S
        tied = [cost for cost in tied if cost.evict_s + cost.price_s <= bound]
    least = min(cost.uncached_tokens for cost in tied)
    tied = [cost for cost in tied if cost.uncached_tokens == least]
    assert decision.cost == tied[int(random_ratio * len(tied))]


def all_at_rest(given: PickInput) -> bool:
    """Whether nobody has anything to do, and the request belongs to no session."""
    if given.session_endpoint_id is not None:
        return False
    for view in given.endpoints:
        load = given.loads.get(view.endpoint_id, NO_LOAD)
        if load.num_inflight or load.queued_prefill_tokens or view.num_running or view.num_waiting:
            return False
        if view.running_prefill_tokens or view.waiting_prefill_tokens:
            return False
    return True


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
