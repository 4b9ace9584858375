"""When prompts should have been computed whose first byte will not tell: of an answer that is not streamed it is the
last one, and until then the prompt would count as queued work for as long as the worker generates. When the guess is
early, the worker's report still counts.

Owns one timer for all of them. Whoever decides says `tick` first, so that a decision is never behind the clock.
"""

from __future__ import annotations

import asyncio
import time
from heapq import heapify, heappop, heappush

from gateway.routing.load_ledger import Booking

LOOK_S = 0.01
# So many more than are under way stay in the heap at most.
ENDED_MAX = 256


class Prefills:
    """Lives on the event loop. As many entries as bookings, and those that ended early, for a while."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Booking]] = []  # the number decides, so bookings are never compared
        self._num_expected = 0
        self._num_ended = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def expect(self, booking: Booking, due_at: float) -> None:
        """Its prompt should have been computed by then, on the clock of time.monotonic()."""
        self._num_expected += 1
        heappush(self._heap, (due_at, self._num_expected, booking))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def ended(self) -> None:
        """A booking has been released that may be here."""
        self._num_ended += 1
        heap = self._heap
        while heap and heap[0][2].released:
            heappop(heap)
        if not heap and self._timer is not None:  # nobody needs waking for a request that has its answer
            self._timer.cancel()
            self._timer = None
        if self._num_ended > len(self._heap) // 2 + ENDED_MAX:
            self._heap = [entry for entry in self._heap if not entry[2].released]
            heapify(self._heap)
            self._num_ended = 0

    def tick(self, now: float) -> None:
        """Prompts that are due by now are computed."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            heappop(heap)[2].prefill_done(now)

    def _look(self) -> None:
        self._timer = None
        self.tick(time.monotonic())
        if self._heap:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
