"""The threads that compute a compiled decode step together: the caller's, and some that sleep between steps.

Owns the sleepers. They are woken once a step and look for each other at its barriers; on cores that others use too
they sleep there at once, as libgomp's threads do.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

import numpy as np

# Of a team's signals, each in a cache line of its own.
ARRIVED, TURN, SLEEPERS, IN_VAIN = 0, 16, 32, 48
LOOKS_MAX = 2000        # some 50 us; shares of a step of few rows end nearer to each other
# A thread that is looked for longer has no core for itself: somebody works on the others, and it gets on only while
# the looker sleeps. After so many such looks by each thread a step's threads sleep at once. A sleeper may wait for
# milliseconds then, many times a step, so half as many threads do the next steps of few rows: at first so many steps,
# twice as many each time that all were tried in vain again.
IN_VAIN_MAX = 8
STEPS_BY_HALF, STEPS_BY_HALF_MAX = 8, 512
FEW_ROWS, MANY_ROWS = range(2)      # kinds of steps; where rows are many, shares may well end apart
logger = logging.getLogger("headstart.model")
Part = Callable[[int], None]


def looks_before_sleep(environment: Mapping[str, str]) -> int:
    """As libgomp has it: PASSIVE sleeps at once, unless GOMP_SPINCOUNT says that it looks a while first."""
    passive = environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return 0 if passive and environment.get("GOMP_SPINCOUNT", "0") == "0" else LOOKS_MAX


class ThreadTeam:
    """`run` calls a function with 0, 1, ... at once, 0 on the caller's thread. One caller at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.looks = looks_before_sleep(os.environ)
        self._signals = np.zeros((2, 64), dtype=np.int32)
        self._steps_by_half, self._turn, self._was_whole = 0, 0, False
        self._part: Part = lambda thread: None
        self._wakers = [threading.Semaphore(0) for _ in range(size - 1)]
        self._started = False

    def for_step(self, kind: int) -> tuple[int, int, np.ndarray]:
        """What a Team is made of, for one step of this kind, which `run` is then called for."""
        signals = self._signals[kind]
        in_vain = signals[IN_VAIN] >= IN_VAIN_MAX * (self.size - 1) > 0
        signals[IN_VAIN] = 0
        if kind == MANY_ROWS or not self._goes_by_half(in_vain):
            return self.size, self.looks, signals
        return self.size // 2, self.looks, signals

    def _goes_by_half(self, in_vain: bool) -> bool:
        """`in_vain`: the last step of few rows looked so."""
        if self._was_whole:
            self._turn = min(STEPS_BY_HALF_MAX, 2 * self._turn or STEPS_BY_HALF) if in_vain else 0
            self._steps_by_half = self._turn
        self._was_whole = self._steps_by_half == 0
        self._steps_by_half = max(0, self._steps_by_half - 1)
        return not self._was_whole

    def run(self, part: Part, size: int) -> None:
        """`part` must itself wait until each of the first `size` threads is through with what matters."""
        if self.size > 1 and not self._started:
            self._started = True
            for thread in range(1, self.size):
                threading.Thread(target=self._serve, args=(thread,), name=f"decode-{thread}", daemon=True).start()
        self._part = part
        for waker in self._wakers[:size - 1]:
            waker.release()
        part(0)

    def _serve(self, thread: int) -> None:
        waker = self._wakers[thread - 1]
        while True:
            waker.acquire()
            try:
                self._part(thread)
            except Exception:   # code that cannot be compiled; the next step may be another's, and waits for all
                logger.exception("a thread's part of a step failed")
