"""Several claimants on one shared memory, each in a thread of its own, and only one of them moves at a time: from one
word read or written to the next, in the order that the test chooses. The code under test is the real one; what is
stood in for is the processor's memory and the kernel's lock.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any

from gateway.shared.segment import Segment


class Killed(BaseException):
    """The process was ended at this step: nothing of it runs any more, but the kernel takes its lock."""


class Claimant:
    """One process: `work` runs in its own thread, a step at a time."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.may_go_on: Callable[[], bool] = lambda: True
        self.is_done = False
        self.error: BaseException | None = None
        self._is_killed = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Called by the test: go on to the next word."""
        self._go.release()
        self._stopped.acquire()

    def kill(self) -> None:
        """Called by the test: it ends where it is."""
        self._is_killed = True
        while not self.is_done:
            self.step()

    def pause(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Called in its thread: here others may move."""
        if not self._is_killed:
            self.may_go_on = may_go_on
            self._stopped.release()
            self._go.acquire()
            self.may_go_on = lambda: True
            if self._is_killed:
                raise Killed

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # for the test's own thread to raise
            self.error = error
        self.is_done = True
        self._stopped.release()


class SteppedWords:
    """A view of shared memory on which every word read or written is a step."""

    def __init__(self, view: Any, pause: Callable[[], None]) -> None:
        self._view = view
        self._pause = pause

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, int):
            self._pause()
            return self._view[at]
        found = array(self._view.format)
        for index in range(*at.indices(len(self._view))):
            self._pause()
            found.append(self._view[index])
        return found

    def __setitem__(self, at: int, value: float) -> None:
        self._pause()
        self._view[at] = value


class SteppedSegment(Segment):
    """A segment whose users are claimants. The lock is held by one claimant at most, unless it `never_waits`: then it
    is always as when the wait for it took too long."""

    def __init__(self, descriptor: int, *, never_waits: bool = False) -> None:
        super().__init__(descriptor)
        self.moving: Claimant | None = None
        self.holder: Claimant | None = None
        self._never_waits = never_waits
        self.words = SteppedWords(self.words, self._pause)  # type: ignore[assignment]
        self.reals = SteppedWords(self.reals, self._pause)  # type: ignore[assignment]

    def __enter__(self) -> None:
        if self.moving is not None and not self._never_waits:
            self.moving.pause(lambda: self.holder is None)
            self.holder = self.moving

    def __exit__(self, *_: object) -> None:
        if self.moving is not None and self.holder is self.moving:
            self.holder = None

    def _pause(self) -> None:
        if self.moving is not None:
            self.moving.pause()


def run_all(segment: SteppedSegment, claimants: list[Claimant], choose: Callable[[int], int],
            on_step: Callable[[], None], until: Callable[[], bool] | None = None) -> None:
    """`until` then, or until all are done; `choose` says which of so many that can move does."""
    while movable := [one for one in claimants if not one.is_done and one.may_go_on()]:
        segment.moving = movable[choose(len(movable))]
        segment.moving.step()
        if segment.moving.error is not None:
            raise segment.moving.error
        on_step()
        if until is not None and until():
            return
    segment.moving = None
    assert until is not None or all(one.is_done for one in claimants), "each waits for another"
