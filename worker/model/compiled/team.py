"""The threads that compute a compiled decode step together: the caller's, and some that sleep between steps.

Owns the sleepers. They are woken once a step and look for each other at its barriers; on cores that others use too
they sleep there at once, as libgomp's threads do.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np

from worker.model.compiled.team_size import TeamSize

# Of a team's signals, each in a cache line of its own.
ARRIVED, TURN, SLEEPERS, IN_VAIN = 0, 16, 32, 48
FEW_ROWS, MANY_ROWS = range(2)      # kinds of steps
# Some 200 us and 5 ms: shares of a step end nearer to each other. Beside somebody who works on its core as well, who
# sleeps may get it back milliseconds later, many times a step.
LOOKS_MAX = (8_000, 200_000)
# A thread that is looked for longer may share the looker's own core, and then gets on only while the looker sleeps.
# After so many such looks by each thread a step's threads sleep at once.
IN_VAIN_MAX = 8
logger = logging.getLogger("headstart.model")
Part = Callable[[int], None]


def looks_before_sleep(environment: Mapping[str, str]) -> tuple[int, int]:
    """By kind of step. As libgomp has it: PASSIVE sleeps at once, unless GOMP_SPINCOUNT says that it looks first."""
    passive = environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return (0, 0) if passive and environment.get("GOMP_SPINCOUNT", "0") == "0" else LOOKS_MAX


class ThreadTeam:
    """`run` calls a function with 0, 1, ... at once, 0 on the caller's thread. One caller at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.looks = looks_before_sleep(os.environ)
        self._signals = np.zeros((2, 64), dtype=np.int32)
        self._few_rows = TeamSize(size)
        self._part: Part = lambda thread: None
        self._wakers = [threading.Semaphore(0) for _ in range(size - 1)]
        self._started = False

    def for_step(self, kind: int) -> tuple[int, int, np.ndarray]:
        """What a Team is made of, for one step of this kind, which `run` is then called for."""
        signals = self._signals[kind]
        signals[IN_VAIN] = 0
        return self._size_for(kind), self.looks[kind], signals

    def run(self, part: Part, kind: int) -> None:
        """`part` must itself wait until every thread of the step is through with what matters."""
        if self.size > 1 and not self._started:
            self._started = True
            for thread in range(1, self.size):
                threading.Thread(target=self._serve, args=(thread,), name=f"decode-{thread}", daemon=True).start()
        self._part = part
        began = perf_counter()
        for waker in self._wakers[:self._size_for(kind) - 1]:
            waker.release()
        part(0)
        if kind == FEW_ROWS:
            in_vain = self._signals[kind][IN_VAIN] >= IN_VAIN_MAX * (self.size - 1)
            self._few_rows.took(perf_counter() - began, in_vain and self.size > 1)

    def _size_for(self, kind: int) -> int:
        return self._few_rows.now if kind == FEW_ROWS else self.size

    def _serve(self, thread: int) -> None:
        waker = self._wakers[thread - 1]
        while True:
            waker.acquire()
            try:
                self._part(thread)
            except Exception:   # code that cannot be compiled; the next step may be another's, and waits for all
                logger.exception("a thread's part of a step failed")
