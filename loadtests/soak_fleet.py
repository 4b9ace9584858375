"""The processes of a soak: a gateway, workers that are killed and started again, and what the gateway holds.

Owns the children it starts. Must never: signal a process that it did not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import secrets
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import orjson

from loadtests.local_stack import Child, free_port, start

RESTART_AFTER_S = 1.0
SETTLE_S = 90.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
StartWorker = Callable[[int, dict[str, str]], Child]


@dataclass(frozen=True)
class Held:
    """What a process holds at one moment. `tasks` counts those of its event loop."""

    at_s: float
    rss_bytes: int
    sockets: int
    tasks: int


@dataclass
class Fleet:
    """A gateway and its workers."""

    gateway: Child
    workers: list[Child]
    start_worker: Callable[[int], Child]
    admin_token: str
    num_kills: int = 0
    samples: list[Held] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)

    @property
    def port(self) -> int:
        """Where the gateway listens."""
        return int(self.gateway.url.rpartition(":")[2])

    def get(self, path: str) -> bytes:
        """A route of the gateway's, as an admin."""
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        request = urllib.request.Request(self.gateway.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            return bytes(response.read())

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        found = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics").decode())
        return sum(map(float, found))

    def held(self) -> Held:
        """What the gateway's process holds now."""
        pid = self.gateway.process.pid
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        sockets = 0
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        return Held(round(time.monotonic() - self.began_at, 1), pages * _PAGE_BYTES, sockets,
                    int(self.metric("headstart_event_loop_tasks")))

    def load(self) -> dict[str, float]:
        """Everything that must be zero when nobody asks for anything."""
        workers = orjson.loads(self.get("/admin/workers"))["workers"]
        return {"inflight": sum(worker["inflight"] for worker in workers),
                "queued": self.metric("headstart_queue_depth")}

    async def kill_now_and_then(self, every_s: float, rng: random.Random) -> None:
        """SIGKILL a worker, start it again, and so on. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s * (0.5 + rng.random()))
            index = rng.randrange(len(self.workers))
            killed = self.workers[index]
            killed.process.kill()
            await asyncio.to_thread(killed.process.wait)
            killed.log.close()
            self.num_kills += 1
            await asyncio.sleep(RESTART_AFTER_S)
            self.workers[index] = self.start_worker(int(killed.url.rpartition(":")[2]))

    async def sample(self, every_s: float) -> None:
        """Look at the gateway's process now and then. Runs until cancelled."""
        while True:
            self.samples.append(await asyncio.to_thread(self.held))
            await asyncio.sleep(every_s)

    async def settle(self, before: Held) -> tuple[dict[str, float], Held]:
        """Wait until nothing is left of the load, or long enough."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            load, held = await asyncio.to_thread(self.load), await asyncio.to_thread(self.held)
            is_over = not any(load.values()) and held.sockets <= before.sockets and held.tasks <= before.tasks
            if is_over or time.monotonic() > deadline:
                return load, held
            await asyncio.sleep(1.0)

    async def until_exact(self) -> None:
        """Every worker ready, its events in sequence."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            workers = orjson.loads(await asyncio.to_thread(self.get, "/admin/workers"))["workers"]
            if all(worker["state"] == "ready" and worker["knowledge"] == "exact" for worker in workers):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway does not know its workers: {workers}")
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def running_fleet(start_worker: StartWorker, *, num_workers: int,
                        arguments: Sequence[str] = ()) -> AsyncIterator[Fleet]:
    """Everything ready; everything stopped at the end."""
    tokens = {"HEADSTART_ADMIN_TOKEN": secrets.token_hex(16), "HEADSTART_WORKER_TOKEN": secrets.token_hex(16)}
    ports = [free_port() for _ in range(num_workers)]
    workers = [start_worker(port, tokens) for port in ports]
    port = free_port()
    gateway = start(["gateway", f"--port={port}", "--log-level=warning", "--health-interval-s=0.5", *arguments,
                     *(f"--worker=http://127.0.0.1:{worker}" for worker in ports)],
                    url=f"http://127.0.0.1:{port}", env=tokens)
    fleet = Fleet(gateway, workers, lambda port: start_worker(port, tokens), tokens["HEADSTART_ADMIN_TOKEN"])
    try:
        await asyncio.to_thread(gateway.wait_ready)
        await fleet.until_exact()
        yield fleet
    finally:
        for child in [gateway, *fleet.workers]:
            await asyncio.to_thread(child.stop)
