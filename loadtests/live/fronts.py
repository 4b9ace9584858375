"""What can stand in front of a fleet: our gateway under some policy, or a router of others.

Owns how each is started, when it is ready, and why one is left out. Each is started afresh for each run, so that it
knows as little of the workers' caches as there is in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from loadtests.live.fleet import Fleet
from loadtests.live.waiting import until
from loadtests.local_stack import Child, free_port, start

STOP_S = 10.0
LOG_BYTES_MAX = 1 << 26   # of our gateway's lines, the newest
OUR_POLICIES = ("headstart", "round_robin", "least_load")
SGLANG = "sglang-router"
VLLM_POLICIES = ("consistent_hash", "sticky_least_loaded")
VLLM = tuple(f"vllm-router {policy}" for policy in VLLM_POLICIES)


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the others' programs are; names are looked for on PATH."""

    sglang_router: str = SGLANG
    vllm_router: str = "vllm-router"

    def missing(self, front: str) -> str | None:
        """Why this front cannot be started; None when it can."""
        name = {SGLANG: self.sglang_router, **dict.fromkeys(VLLM, self.vllm_router)}.get(front)
        return None if name is None or shutil.which(name) else f"not installed: {name} is not on PATH"

    def version(self, front: str) -> str:
        """Of the program behind this front; '' for ours, whose commit is in the report."""
        if front in OUR_POLICIES:
            return ""
        program = shutil.which(self.sglang_router if front == SGLANG else self.vllm_router) or ""
        paths = [str(path) for path in Path(program).resolve().parents[1].glob("lib/python*/site-packages")]
        named = SGLANG if front == SGLANG else "vllm-router"
        return next((found.version for found in importlib.metadata.distributions(name=named, path=paths)), "?")


@dataclass(slots=True)
class Front:
    """A running one. Ours keeps a log line for each request; `request_lines` reads them."""

    name: str
    url: str
    child: Child | None = None

    def request_lines(self) -> list[dict[str, Any]]:
        """The gateway's line of each request that has ended; none of others' routers."""
        if self.child is None:
            return []
        lines = self.child.log_tail(LOG_BYTES_MAX).splitlines()
        return [line for line in map(orjson.loads, filter(_is_request, lines)) if line["event"] == "request"]


def _is_request(line: str) -> bool:
    return line.startswith("{") and '"event":"request"' in line


@contextlib.asynccontextmanager
async def running_front(name: str, fleet: Fleet, programs: Programs) -> AsyncIterator[Front]:
    """Started and ready: ours when it knows every worker exactly, the others when they say that they are healthy."""
    if name in OUR_POLICIES:
        async with _our_gateway(name, fleet) as front:
            yield front
        return
    port, metrics_port = free_port(), free_port()
    command = {SGLANG: [programs.sglang_router, "launch", "--policy", "cache_aware"],
               **{front: [programs.vllm_router, "--policy", policy]
                  for front, policy in zip(VLLM, VLLM_POLICIES, strict=True)}}[name]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.to_thread(subprocess.Popen, [
            *command, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port),
            "--log-level", "error", "--worker-urls", *fleet.urls], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            async with aiohttp.ClientSession() as http:
                await until(lambda: _is_healthy(http, f"http://127.0.0.1:{port}/health"), f"{name} healthy")
            yield Front(name, f"http://127.0.0.1:{port}")
        finally:
            await asyncio.to_thread(_end, process)


@contextlib.asynccontextmanager
async def _our_gateway(policy: str, fleet: Fleet) -> AsyncIterator[Front]:
    port, admin = free_port(), secrets.token_hex(16)
    workers = [part for url in fleet.urls for part in ("--worker", url)]
    child = start(["gateway", "--port", str(port), "--policy", policy, "--drain-delay-s", "0", *workers],
                  url=f"http://127.0.0.1:{port}",
                  env={"HEADSTART_ADMIN_TOKEN": admin, "HEADSTART_WORKER_TOKEN": fleet.worker_token})
    try:
        await asyncio.to_thread(child.wait_ready)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {admin}"}) as http:
            await until(lambda: _is_exact(http, child.url), "every worker known exactly")
        yield Front(policy, child.url, child)
    finally:
        await asyncio.to_thread(child.stop)


async def _is_exact(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/admin/workers") as answer:
        listed = (await answer.json())["workers"]
    return all(worker["state"] == "ready" and worker["knowledge"] == "exact" for worker in listed)


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
