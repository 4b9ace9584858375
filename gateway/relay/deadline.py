"""A deadline that is moved with every chunk and hardly ever reached.

Owns: one timer of the event loop. Moving the deadline later is a comparison: the timer wakes at the time it was armed
for, sees that the deadline has moved, and arms itself again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `reached` once when the instant that was last set() has come; loop.time() is its clock."""

    __slots__ = ("_due_at", "_loop", "_reached", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, reached: Callable[[], None]) -> None:
        self._loop = loop
        self._reached = reached
        self._due_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due_at: float) -> None:
        """The deadline from now on."""
        self._due_at = due_at
        if self._timer is not None:
            if self._timer.when() <= due_at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due_at, self._wake)

    def lift(self) -> None:
        """No deadline for now; the timer stays armed for the next one."""
        self._due_at = None

    def close(self) -> None:
        """No deadline any more."""
        self._due_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        if self._due_at is None:
            return
        if self._due_at > self._loop.time():
            self._timer = self._loop.call_at(self._due_at, self._wake)
            return
        self._due_at = None
        self._reached()
