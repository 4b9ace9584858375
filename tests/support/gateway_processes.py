"""`headstart gateway --processes N` as its own processes, and what tests ask of it and of each process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.local_stack import free_port
from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN, Answer

WAIT_S = 60.0


class ProcessGroup:
    """A running group. Every call is a connection of its own, so the kernel spreads calls over the processes."""

    def __init__(self, supervisor: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.supervisor = supervisor
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True),
                                             timeout=aiohttp.ClientTimeout(total=120))

    # ---- processes -----------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """The gateway processes that run now."""
        tasks = Path(f"/proc/{self.supervisor.pid}/task").iterdir()
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())

    def lines(self, event: str) -> list[dict[str, Any]]:
        """What the log has of this event."""
        whole, _, _ = self.log.read_text().rpartition("\n")  # the last line may still be on its way
        found = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    async def process_of(self, *answers: Answer) -> list[int]:
        """The processes that gave these answers, in order, once their log lines are written."""
        wanted = [answer.headers["x-request-id"] for answer in answers]

        async def written() -> dict[str, int] | None:
            found = {line["request_id"]: line["process"] for line in self.lines("request")}
            return found if found.keys() >= set(wanted) else None

        by_request = await self.until(written, "a line for each request")
        return [by_request[request_id] for request_id in wanted]

    async def until(self, condition: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Await `condition` until it is truthy."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not (value := await condition()):
            assert self.supervisor.poll() is None, self.log.read_text()[-2000:]
            assert asyncio.get_running_loop().time() < deadline, f"never: {what}\n{self.log.read_text()[-2000:]}"
            await asyncio.sleep(0.02)
        return value

    async def until_logged(self, event: str, count: int = 1) -> None:
        """So many lines of this event."""

        async def logged() -> bool:
            return len(self.lines(event)) >= count

        await self.until(logged, event)

    async def until_serving(self, count: int) -> None:
        """So many processes work, no more and no less."""

        async def serving() -> bool:
            return await self.metric("headstart_processes") == count

        await self.until(serving, f"{count} processes")

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    async def send(self, method: str, path: str, *, headers: dict[str, str] | None = None,
                   payload: Any = None) -> Answer:
        """One request on its own connection."""
        async with self.session.request(method, self.url + path, headers=headers, json=payload) as response:
            content = await response.read()
            error = (await response.json()).get("error", {}) if response.status >= 400 else {}
            return Answer(response.status, {name.lower(): value for name, value in response.headers.items()},
                          content, error)

    async def chat(self, text: str, *, key: str, stream: bool = False) -> Answer:
        """One chat request."""
        return await self.send("POST", "/v1/chat/completions", payload=chat_body(text, stream=stream),
                               headers={"Authorization": f"Bearer {key}"})

    async def metrics(self) -> dict[str, float]:
        """Every series of GET /metrics."""
        async with self.session.get(f"{self.url}/metrics") as response:
            rows = [line.rpartition(" ") for line in (await response.text()).splitlines() if line[:1] != "#"]
            return {series: float(value) for series, _, value in rows}

    async def metric(self, series: str) -> float:
        """One series; 0 when it is absent."""
        with contextlib.suppress(aiohttp.ClientError):
            return (await self.metrics()).get(series, 0.0)
        return 0.0

    async def workers(self) -> list[dict[str, Any]]:
        """GET /admin/workers."""
        answer = await self.send("GET", "/admin/workers", headers=ADMIN)
        return list(json.loads(answer.body)["workers"])


def chat_body(text: str, *, stream: bool) -> dict[str, Any]:
    """A chat request with one user message."""
    return {"model": "stub", "messages": [{"role": "user", "content": text}], "stream": stream}


@contextlib.asynccontextmanager
async def running_group(*urls: str, processes: int, log: Path, arguments: Sequence[str] = ()
                        ) -> AsyncIterator[ProcessGroup]:
    """A group in front of these workers, all of its processes serving."""
    port = free_port()
    supervisor = _start(port, processes, log, [*(f"--worker={url}" for url in urls), *arguments])
    group = ProcessGroup(supervisor, port, log)
    try:
        await group.until_serving(processes)
        yield group
    finally:
        await group.session.close()
        supervisor.send_signal(signal.SIGINT)
        supervisor.send_signal(signal.SIGTERM)
        await asyncio.to_thread(supervisor.wait, WAIT_S)


def _start(port: int, processes: int, log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    environ |= {"HEADSTART_WORKER_TOKEN": WORKER_TOKEN, "HEADSTART_ADMIN_TOKEN": "admin"}
    command = [sys.executable, "-m", "gateway.cli", "gateway", f"--port={port}", f"--processes={processes}",
               "--health-interval-s=0.2", "--drain-delay-s=0", *arguments]
    with open(log, "wb") as out:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
