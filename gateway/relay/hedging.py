"""A second worker asked for a stream that has not begun in time; the first of both to begin is the client's.

Owns: how many requests are asked twice at once, and that the slower one is cut the moment the other begins. Must
never: let a hedge fail a request that the first worker would have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.relay.retry import Attempt, AttemptFailed, FirstAnswer

Answered = tuple[Attempt, FirstAnswer]
Ask = Callable[[Attempt], Coroutine[Any, Any, FirstAnswer]]


@dataclass(slots=True)
class Hedges:
    """`after_s` None: off. `count` gets each outcome: won, lost, no_worker, or limit (none was sent)."""

    after_s: float | None
    hedges_max: int
    count: Callable[[str], None]
    num_out: int = 0

    def book(self, second: Callable[[], Attempt | None]) -> Attempt | None:
        """A second worker, when one more may be asked and there is one."""
        if self.num_out >= self.hedges_max:
            self.count("limit")
            return None
        attempt = second()
        if attempt is None:
            self.count("no_worker")
        return attempt


async def hedged(first: Coroutine[Any, Any, Answered], second: Callable[[], Attempt | None], ask: Ask,
                 hedges: Hedges) -> Answered:
    """`first`'s outcome, or that of the worker which `second` books when that one begins earlier."""
    walking = asyncio.create_task(first)
    asking: asyncio.Task[Answered] | None = None
    winner: asyncio.Task[Answered] | None = None
    try:
        await asyncio.wait({walking}, timeout=hedges.after_s)
        if not walking.done() and (attempt := hedges.book(second)) is not None:
            hedges.num_out += 1
            asking = asyncio.create_task(_asked(attempt, ask))
        winner = await _first_good(walking, asking)
        if asking is not None:
            hedges.count("won" if winner is asking else "lost")
        return winner.result()
    finally:
        hedges.num_out -= asking is not None
        for task in (walking, asking):
            if task is not None and task is not winner:
                await _drop(task)


async def _first_good(walking: asyncio.Task[Answered],
                      asking: asyncio.Task[Answered] | None) -> asyncio.Task[Answered]:
    """Whoever is first to have an answer; when nobody has one, `walking`, whose failure is the last word."""
    pending = {task for task in (walking, asking) if task is not None}
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in (walking, asking):
            if task in done and task.exception() is None:
                return task
    return walking


async def _asked(attempt: Attempt, ask: Ask) -> Answered:
    try:
        return attempt, await ask(attempt)
    except AttemptFailed as failure:
        attempt.failed(failure.reason)
        raise
    except BaseException:
        attempt.abandon()
        raise


async def _drop(task: asyncio.Task[Answered]) -> None:
    """End it, whatever it has come to; an answer nobody wants is cut, so that its worker stops."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is None:
        attempt, answer = task.result()
        answer.response.close()
        attempt.abandon()
