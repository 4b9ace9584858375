"""Worker processes on one seeded model, for live comparisons: started once, emptied between runs.

Owns the processes it starts. It must never put anything in front of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.live.waiting import until
from loadtests.local_stack import Child, free_port, start

SERVED_NAME = "tiny"
TOKEN_HEADER = "x-headstart-worker-token"


class FleetError(Exception):
    """The workers do not do what they should; the message says what."""


@dataclass(frozen=True)
class Fleet:
    """Running workers, and the token that gateways and the reset need."""

    workers: list[Child]
    worker_token: str

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers]

    async def states(self) -> list[dict[str, Any]]:
        """GET /kv of each."""
        async with aiohttp.ClientSession(headers={TOKEN_HEADER: self.worker_token}) as http:
            return [await _state(http, url) for url in self.urls]

    async def empty(self) -> None:
        """Wait until nothing runs, then forget every cached block."""
        async with aiohttp.ClientSession(headers={TOKEN_HEADER: self.worker_token}) as http:
            await self._until(http, _is_idle, "idle")
            for url in self.urls:
                async with http.post(f"{url}/kv/reset") as answer:
                    if answer.status != 202:
                        raise FleetError(f"{url}/kv/reset answered {answer.status}")
            await self._until(http, lambda state: state["blocks"]["cached"] == 0, "without a cached block")

    async def _until(self, http: aiohttp.ClientSession, is_so: Callable[[dict[str, Any]], bool], what: str) -> None:
        async def all_are() -> bool:
            return all([is_so(await _state(http, url)) for url in self.urls])
        await until(all_are, f"every worker {what}")


def _is_idle(state: dict[str, Any]) -> bool:
    return not any(state["load"][key] for key in ("running", "waiting", "requests"))


async def _state(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/kv") as answer:
        return dict(await answer.json())


@contextlib.asynccontextmanager
async def running_fleet(model: Path, *, num_workers: int, arguments: Sequence[str] = ()) -> AsyncIterator[Fleet]:
    """`headstart worker` so many times, one thread each, all ready."""
    token = secrets.token_hex(16)
    fleet = Fleet([], token)
    try:
        for _ in range(num_workers):
            port = free_port()
            fleet.workers.append(start(
                ["worker", "--model", str(model), "--port", str(port), "--threads", "1", "--served-name", SERVED_NAME,
                 *arguments], url=f"http://127.0.0.1:{port}", env={"HEADSTART_WORKER_TOKEN": token}))
        for worker in fleet.workers:
            await asyncio.to_thread(worker.wait_ready)
        yield fleet
    finally:
        for worker in fleet.workers:
            await asyncio.to_thread(worker.stop)
