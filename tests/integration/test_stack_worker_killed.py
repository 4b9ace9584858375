"""A worker killed with requests waiting on it: the other answers them all, and its old blocks are forgotten."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal

import aiohttp

from loadtests.local_stack import running_stack
from tests.support.stack_api import admin_workers, eventually, kv_state

NUM_REQUESTS = 20


async def test_kill_9_with_requests_waiting_for_their_first_byte(http: aiohttp.ClientSession) -> None:
    with running_stack(workers=2, model="smollm2", arguments=["--kv-memory", "512MiB"]) as stack:
        async def one(number: int) -> int:
            content = f"{secrets.token_hex(8)} request {number}. " + "A sentence that takes some time to read. " * 25
            body = {"model": "smollm2", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            async with http.post(f"{stack.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return int((await response.json())["usage"]["completion_tokens"])

        async def busiest() -> dict[str, object] | None:
            # Nothing is streamed, so every request in flight is still waiting for its first byte.
            worker = max(await admin_workers(http, stack), key=lambda worker: int(worker["inflight"]))
            return worker if worker["inflight"] >= 8 else None

        requests = [asyncio.ensure_future(one(number)) for number in range(NUM_REQUESTS)]
        victim = await eventually(busiest, what="8 requests in flight on one worker")
        old_epoch = (await kv_state(http, str(victim["url"])))["epoch"]
        os.kill(int(victim["pid"]), signal.SIGKILL)
        assert all(tokens >= 1 for tokens in await asyncio.gather(*requests))
        await _restarted_and_forgotten(http, stack, victim, old_epoch)


async def _restarted_and_forgotten(
    http: aiohttp.ClientSession, stack: object, victim: dict[str, object], old_epoch: str
) -> None:
    async def back() -> dict[str, object] | None:
        listed = {worker["id"]: worker for worker in await admin_workers(http, stack)}  # type: ignore[arg-type]
        worker = listed[victim["id"]]
        return worker if worker["state"] == "ready" and worker["epoch"] not in (None, old_epoch) else None

    worker = await eventually(back, timeout_s=90, what="the killed worker to be back with a new epoch")
    cached = (await kv_state(http, str(victim["url"])))["blocks"]["cached"]
    assert worker["blocks"] == cached, "the index holds blocks that the restarted worker does not have"
