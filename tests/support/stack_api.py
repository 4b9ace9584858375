"""What the end-to-end tests ask of a running stack, in one line each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from loadtests.local_stack import Child


async def admin_workers(http: aiohttp.ClientSession, stack: Child) -> list[dict[str, Any]]:
    """GET /admin/workers with the stack's token."""
    headers = {"Authorization": f"Bearer {stack.admin_token}"}
    async with http.get(f"{stack.url}/admin/workers", headers=headers) as response:
        assert response.status == 200, await response.text()
        return list((await response.json())["workers"])


async def kv_state(http: aiohttp.ClientSession, worker_url: str) -> dict[str, Any]:
    """GET /kv of one worker."""
    async with http.get(f"{worker_url}/kv") as response:
        assert response.status == 200, await response.text()
        return dict(await response.json())


async def computed_positions(http: aiohttp.ClientSession, urls: list[str]) -> int:
    """Positions computed so far, summed over the workers."""
    return sum([int((await kv_state(http, url))["computed_positions_total"]) for url in urls])


async def eventually(condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "condition") -> Any:
    """Await `condition()` until it is truthy; fail with `what` when the time is over."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        value = await condition()
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s:.0f} s: {what}"
        await asyncio.sleep(0.05)
