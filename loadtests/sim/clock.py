"""The virtual clock: what happens next, and when.

Owns the order of events. At one instant, lower `rank` goes first, then whoever was scheduled first; so a run is a
function of its inputs alone. It must never look at a real clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

WORKER_STEP = 0   # a worker's step ends before anything else happens at that instant
ELSE = 1


class VirtualClock:
    """Events in the order of their instants, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def at(self, instant: float, action: Callable[[], None], rank: int = ELSE) -> None:
        """Run `action` at `instant`; one in the past runs now."""
        self.num_events += 1
        heapq.heappush(self._queue, (max(instant, self.now), rank, self.num_events, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._queue:
            return False
        self.now, _, _, action = heapq.heappop(self._queue)
        action()
        return True
