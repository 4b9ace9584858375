"""Those who come in one turn of the event loop, so that they can take their steps together.

What a step needs of the processor's caches is then loaded once for all. Owns: who waits for the end of the turn.
Must never: let anybody wait who is alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

# So many go together; then it is others' turn on the loop.
TOGETHER_MAX = 32

T = TypeVar("T")


class Companions(Generic[T]):
    """`go` takes those who go together."""

    def __init__(self, go: Callable[[list[T]], None]) -> None:
        self._go = go
        self._loop = asyncio.get_running_loop()
        self._waiting: list[T] = []

    def add(self, one: T, *, is_alone: bool) -> None:
        """It goes when this turn of the loop has ended, or now: whoever is alone shares nothing by waiting."""
        self._waiting.append(one)
        if is_alone:
            self._depart()
        elif len(self._waiting) == 1:
            self._loop.call_soon(self._depart)

    def _depart(self) -> None:
        going, self._waiting = self._waiting[:TOGETHER_MAX], self._waiting[TOGETHER_MAX:]
        if self._waiting:
            self._loop.call_soon(self._depart)
        if going:
            self._go(going)
