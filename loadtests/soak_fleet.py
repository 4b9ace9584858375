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
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import orjson

from loadtests.bench.gateway_targets import cpu_ns
from loadtests.local_stack import READY_TIMEOUT_S, Child, StackError, start

RESTART_AFTER_S = 1.0
SETTLE_S = 90.0
STARTS_MAX = 3
PORTS = range(15_000, 32_768)  # below those that the kernel gives to outgoing connections, such as our clients'
REST_S, REST_LOOK_S = 5.0, 0.2  # polls and feeds open sockets now and then, also when nobody asks for anything
_CACHES = ("headstart_tokenizer_cache_bytes", "headstart_reply_memory_bytes", "headstart_index_bytes")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
StartWorker = Callable[[int, dict[str, str]], Child]


@dataclass(frozen=True)
class Held:
    """What a process holds at one moment. `tasks` counts those of its event loop; `cache_bytes` is what its caches,
    each with a limit, say that they hold. `requests`: how many had ended by then."""

    at_s: float
    rss_bytes: int
    sockets: int
    tasks: int
    cache_bytes: int = 0
    requests: int = 0


@dataclass
class Fleet:
    """A gateway and its workers."""

    gateway: Child
    workers: list[Child]
    start_worker: Callable[[int], Child]
    admin_token: str
    num_kills: int = 0
    num_missed_samples: int = 0
    killed_cpu_ns: int = 0
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
                    int(self.metric("headstart_event_loop_tasks")), int(sum(map(self.metric, _CACHES))))

    def cpu_s(self) -> dict[str, float]:
        """CPU time of every process so far, workers that were killed included."""
        workers = self.killed_cpu_ns + sum(cpu_ns(worker.process.pid) for worker in self.workers
                                           if worker.process.poll() is None)
        return {"gateway": cpu_ns(self.gateway.process.pid) / 1e9, "workers": workers / 1e9,
                "clients": time.process_time()}

    async def at_rest(self) -> Held:
        """The most that it holds while nobody asks for anything."""
        looks = [await asyncio.to_thread(self.held)]
        while looks[-1].at_s - looks[0].at_s < REST_S:
            await asyncio.sleep(REST_LOOK_S)
            looks.append(await asyncio.to_thread(self.held))
        return Held(looks[-1].at_s, *(max(values) for values in zip(*(
            (held.rss_bytes, held.sockets, held.tasks, held.cache_bytes) for held in looks), strict=True)))

    def sockets_max(self, before: Held) -> int:
        """At rest once more. Two looks at a worker that overlap, as when it joins, leave a second kept connection:
        aiohttp's session takes them in turns, so neither is ever unused for long."""
        return before.sockets + len(self.workers)

    def load(self) -> dict[str, float]:
        """Everything that must be zero when nobody asks for anything."""
        workers = orjson.loads(self.get("/admin/workers"))["workers"]
        return {"inflight": sum(worker["inflight"] for worker in workers),
                "queued": self.metric("headstart_queue_depth")}

    async def kill_now_and_then(self, every_s: float, rng: random.Random) -> None:
        """SIGKILL a worker, start it again, and so on. Runs until cancelled, which leaves none of them dead."""
        while True:
            await asyncio.sleep(every_s * (0.5 + rng.random()))
            index = rng.randrange(len(self.workers))
            killed = self.workers[index]
            if killed.process.poll() is None:  # one that did not start again gets another chance
                self.killed_cpu_ns += cpu_ns(killed.process.pid)
                killed.process.kill()
                self.num_kills += 1
            try:
                await asyncio.to_thread(killed.process.wait)
                await asyncio.sleep(RESTART_AFTER_S)
            finally:
                killed.log.close()
                self.workers[index] = self.start_worker(int(killed.url.rpartition(":")[2]))

    async def sample(self, every_s: float, num_requests: Callable[[], int]) -> None:
        """Look at the gateway's process now and then. Runs until cancelled."""
        while True:
            try:
                held = await asyncio.to_thread(self.held)
                self.samples.append(replace(held, requests=num_requests()))
            except OSError:  # a machine that is too busy to answer in time
                self.num_missed_samples += 1
            await asyncio.sleep(every_s)

    async def stop(self) -> None:
        """End every child."""
        for child in (self.gateway, *self.workers):
            await asyncio.to_thread(child.stop)

    async def settle(self, before: Held) -> tuple[dict[str, float], Held]:
        """Wait until nothing is left of the load, or long enough."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            load, held = await asyncio.to_thread(self.load), await asyncio.to_thread(self.held)
            is_over = (not any(load.values()) and held.sockets <= self.sockets_max(before)
                       and held.tasks <= before.tasks)
            if is_over or time.monotonic() > deadline:
                return load, held
            await asyncio.sleep(1.0)

    async def until_exact(self) -> None:
        """Every worker ready, its events in sequence. StackError when a child ends before that."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await asyncio.to_thread(self._is_exact):
            for child in (self.gateway, *self.workers):
                if child.process.poll() is not None:
                    raise StackError(f"{child.url} ended with {child.process.returncode}: {child.log_tail(500)}")
            if time.monotonic() > deadline:
                raise TimeoutError("the gateway does not know its workers")
            await asyncio.sleep(0.2)

    def _is_exact(self) -> bool:
        try:
            workers = orjson.loads(self.get("/admin/workers"))["workers"]
        except OSError:
            return False  # it does not listen yet
        return all(worker["state"] == "ready" and worker["knowledge"] == "exact" for worker in workers)


def steady_ports(count: int) -> list[int]:
    """So many that are free, and stay so while nobody listens there: no outgoing connection is given one."""
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found


@contextlib.asynccontextmanager
async def running_fleet(start_worker: StartWorker, *, num_workers: int,
                        arguments: Sequence[str] = ()) -> AsyncIterator[Fleet]:
    """Everything ready; everything stopped at the end. Should a port be taken meanwhile, all start on others."""
    for num_left in reversed(range(STARTS_MAX)):
        fleet = await _ready(_start_all(start_worker, num_workers, arguments), may_fail=num_left > 0)
        if fleet is not None:
            break
    assert fleet is not None, "the last try raises"
    try:
        yield fleet
    finally:
        await fleet.stop()


async def _ready(fleet: Fleet, *, may_fail: bool = True) -> Fleet | None:
    """The fleet once all of it serves; None when it did not start, which then has ended."""
    try:
        await fleet.until_exact()
        return fleet
    except BaseException as error:
        await fleet.stop()
        if not may_fail or not isinstance(error, StackError):
            raise
        print(f"the start failed and is tried again: {error}", file=sys.stderr)
        return None


def _start_all(start_worker: StartWorker, num_workers: int, arguments: Sequence[str]) -> Fleet:
    tokens = {"HEADSTART_ADMIN_TOKEN": secrets.token_hex(16), "HEADSTART_WORKER_TOKEN": secrets.token_hex(16)}
    port, *ports = steady_ports(1 + num_workers)
    workers = [start_worker(port, tokens) for port in ports]
    gateway = start(["gateway", f"--port={port}", "--log-level=warning", "--health-interval-s=0.5", *arguments,
                     *(f"--worker=http://127.0.0.1:{worker}" for worker in ports)],
                    url=f"http://127.0.0.1:{port}", env=tokens, hears_ctrl_c=False)
    return Fleet(gateway, workers, lambda port: start_worker(port, tokens), tokens["HEADSTART_ADMIN_TOKEN"])
