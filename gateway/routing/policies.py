"""Routing policies by name, behind one signature: `--policy` and the simulator choose from this table.

Owns the baselines. Each is a pure function of PickInput, like `pick`; state such as a turn counter comes in as a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD
from gateway.routing.picker import NoEndpoint, PickInput, Reason, RoutingDecision, decide, eligible, pick

Policy = Callable[[PickInput], RoutingDecision | NoEndpoint]


def round_robin(given: PickInput) -> RoutingDecision | NoEndpoint:
    """The endpoints in turn, by `turn`."""
    views = eligible(given)
    return views if isinstance(views, NoEndpoint) else _decide(given, views, given.turn % len(views))


def at_random(given: PickInput) -> RoutingDecision | NoEndpoint:
    """Any endpoint, by `random_ratio`."""
    views = eligible(given)
    return views if isinstance(views, NoEndpoint) else _decide(given, views, int(given.random_ratio * len(views)))


def least_load(given: PickInput) -> RoutingDecision | NoEndpoint:
    """The fewest requests, then the fewest queued prompt tokens, then by chance; caches do not count."""
    views = eligible(given)
    if isinstance(views, NoEndpoint):
        return views
    loads = [_load(given, view) for view in views]
    least = min(loads)
    tied = [index for index, load in enumerate(loads) if load == least]
    return _decide(given, views, tied[int(given.random_ratio * len(tied))])


POLICIES: dict[str, Policy] = {
    "headstart": pick,
    "round_robin": round_robin,
    "least_load": least_load,
    "random": at_random,
}


def policy_named(name: str) -> Policy:
    """ValueError names the known ones."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}: use one of {', '.join(POLICIES)}")
    return policy


def _load(given: PickInput, view: EndpointView) -> tuple[int, int]:
    load = given.loads.get(view.endpoint_id, NO_LOAD)
    return (max(load.num_inflight, view.num_running + view.num_waiting),
            max(load.queued_prefill_tokens, view.waiting_prefill_tokens + view.running_prefill_tokens))


def _decide(given: PickInput, views: Sequence[EndpointView], index: int) -> RoutingDecision:
    reason: Reason = "retry" if given.excluded else "load"
    return decide(given, views[index], reason)
