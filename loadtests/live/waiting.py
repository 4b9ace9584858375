"""Waiting for other processes, with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.05
WAIT_S = 180.0


class NotInTime(Exception):
    """What was waited for did not come; the message says what that was."""


async def until(is_so: Callable[[], Awaitable[bool]], what: str, *, timeout_s: float = WAIT_S) -> None:
    """Ask again and again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await is_so():
        if loop.time() >= deadline:
            raise NotInTime(f"after {timeout_s:.0f} s not yet: {what}")
        await asyncio.sleep(POLL_S)
