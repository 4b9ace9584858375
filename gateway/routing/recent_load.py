"""How busy each endpoint was in the last seconds, and what one more request would have cost there: running means over
looks at the fleet, a few in a second.

Owns the means. It must never read a clock. An instant says little: an endpoint at the edge of saturation is idle
many times in a second. So one that has not been looked at for SETTLED_S is not judged, and after a pause of
PAUSE_MAX_S, or in another life of its worker, it begins anew. As many entries as endpoints in the last look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.routing.cost import Rates, Work, assumed_rates, candidate_cost
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.output_length import DEFAULT_OUTPUT_TOKENS
from gateway.routing.prefix_index import NO_MATCH
from gateway.routing.shared_cores import Crowding

MEAN_OVER_S = 5.0     # after so long a look counts e times less
SETTLED_S = 5.0
PAUSE_MAX_S = 2.0     # between two looks
# A hit computes next to nothing, and finds what others wait for.
_NO_CROWDING: Mapping[str, Crowding] = {}
_HIT = Work(prompt_tokens=1, expected_output_tokens=DEFAULT_OUTPUT_TOKENS)


class Recent(NamedTuple):
    """`busy_share` of the last seconds there was a request, or that share of the cores was busy that it has in common
    with others; `wait_s` is what a hit would have cost beyond itself: the queue, the steps, and what it does to the
    streams there."""

    busy_share: float
    wait_s: float


class _Seen(NamedTuple):
    epoch: str
    since: float
    recent: Recent


class RecentLoad:
    """By endpoint. `look` is told the whole fleet every time."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._looked_at = -math.inf

    def look(self, views: Iterable[EndpointView], loads: Mapping[str, LoadView], now: float,
             crowding: Mapping[str, Crowding] = _NO_CROWDING) -> None:
        """One look; instants are of any one monotonic clock."""
        passed_s = now - self._looked_at
        if passed_s > PAUSE_MAX_S:
            self._seen = {}
        weight = -math.expm1(-passed_s / MEAN_OVER_S)
        seen, fleet = self._seen, list(views)
        self._seen, self._looked_at = {}, now
        rates = assumed_rates(fleet)
        for view in fleet:
            newest = _as_of_now(view, loads.get(view.endpoint_id, NO_LOAD), rates, crowding.get(view.endpoint_id))
            before = seen.get(view.endpoint_id)
            if before is None or before.epoch != view.epoch:
                self._seen[view.endpoint_id] = _Seen(view.epoch, now, newest)
            else:
                mean = Recent(*(old + weight * (new - old) for old, new in zip(before.recent, newest, strict=True)))
                self._seen[view.endpoint_id] = _Seen(view.epoch, before.since, mean)

    def of(self, endpoint_id: str) -> Recent | None:
        """None as long as it has not been looked at for long enough."""
        seen = self._seen.get(endpoint_id)
        return seen.recent if seen is not None and self._looked_at - seen.since >= SETTLED_S else None


def num_active(view: EndpointView, load: LoadView) -> int:
    """Requests there, of ours or anybody's."""
    return max(load.num_inflight, view.num_running + view.num_waiting)


def _as_of_now(view: EndpointView, load: LoadView, rates: Rates, crowding: Crowding | None) -> Recent:
    if not num_active(view, load):
        return Recent(0.0 if crowding is None else crowding.busy_share, 0.0)
    cost = candidate_cost(view, NO_MATCH, load, _HIT, rates=rates)
    return Recent(1.0, cost.queue_s + cost.steps_s + cost.others_s)
