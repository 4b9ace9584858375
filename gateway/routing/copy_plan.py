"""Which copy to make next: looks at the hottest prefixes and the fleet, a few in a second, by the rule of copies.py.

Owns the pace: one copy a look, and none twice on one life of a worker within AGAIN_S, whatever became of it. Of
several processes that want the same copy, one makes it: they begin one look after the other, in an order that hangs
on the prefix, and by then the others have been told of its bet. It must never read a clock or send anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.routing.copies import Fleet, is_worth_copies, next_holder
from gateway.routing.endpoint import EndpointView
from gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from gateway.routing.load_ledger import LoadView
from gateway.routing.recent_load import RecentLoad
from gateway.routing.shared_cores import Crowding

LOOK_EVERY_S = 0.25
LOOKED_AT_MAX = 8     # the hottest ones
AGAIN_S = 60.0
TRIED_MAX = 4096


class Copy(NamedTuple):
    """What to compute, and where."""

    prefix: HotPrefix
    endpoint_id: str


def _at_once(key: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Sight:
    """What there is to be seen: everybody, asked only when there is something to copy; what is booked where; who
    holds a prefix whole or will soon; how many looks other processes have first at a prefix of that key; and how busy
    shared cores are."""

    views: Callable[[], Sequence[EndpointView]]
    loads: Mapping[str, LoadView]
    holders: Callable[[HotPrefix], Collection[str]]
    looks_before: Callable[[int], int] = _at_once
    crowding: Mapping[str, Crowding] = field(default_factory=dict)


class CopyPlan:
    """Lives as long as the gateway."""

    def __init__(self, hot: HotPrefixes) -> None:
        self.hot = hot
        self._recent = RecentLoad()
        self._wanted: dict[int, int] = {}   # of the prefixes looked at last: in how many looks on end
        self._tried: dict[tuple[int, str, str], float] = {}

    def next(self, sight: Sight, now: float) -> Copy | None:
        """One look; None when nothing is to be done."""
        worth = [(key, prefix) for key, prefix in self.hot.hottest(LOOKED_AT_MAX, now)
                 if is_worth_copies(prefix, now)] if len(self.hot) else []
        if not worth:
            return None
        views = sight.views()
        self._recent.look(views, sight.loads, now, sight.crowding)
        wanted, self._wanted = self._wanted, {}
        for key, prefix in worth:
            view = self._next_holder(key, prefix, Fleet(_serving(prefix.model, views), sight.loads, self._recent),
                                     sight, now=now)
            if view is None:
                continue
            self._wanted[key] = wanted.get(key, 0) + 1
            if self._wanted[key] > sight.looks_before(key):
                self._note_tried((key, view.endpoint_id, view.epoch), now)
                return Copy(prefix, view.endpoint_id)
        return None

    def _next_holder(self, key: int, prefix: HotPrefix, fleet: Fleet, sight: Sight, *,
                     now: float) -> EndpointView | None:
        tried = {view.endpoint_id for view in fleet.views
                 if now - self._tried.get((key, view.endpoint_id, view.epoch), -math.inf) < AGAIN_S}
        chosen = next_holder(prefix, sight.holders(prefix), fleet, now, passed_over=tried)
        return next((view for view in fleet.views if view.endpoint_id == chosen), None)

    def _note_tried(self, key: tuple[int, str, str], now: float) -> None:
        self._tried[key] = now
        if len(self._tried) > TRIED_MAX:
            del self._tried[next(iter(self._tried))]


def _serving(model: str, views: Sequence[EndpointView]) -> list[EndpointView]:
    return [view for view in views if model in view.models and view.ready and not view.draining]
