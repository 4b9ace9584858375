"""A gateway on real sockets inside the test's own event loop, and what tests ask of it in one line each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.config import GatewayConfig, WorkerSpec
from gateway.server.app import Gateway

ADMIN = {"Authorization": "Bearer admin"}
WORKER_TOKEN = "worker-token"
WAIT_S = 20.0


@dataclass
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    error: dict[str, Any] = field(default_factory=dict)


class GatewayUnderTest:
    """HTTP calls against a running gateway."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.session = session
        self.url = f"http://127.0.0.1:{gateway.port}"

    async def send(self, method: str, path: str, *, headers: dict[str, str] | None = None,
                   body: bytes | None = None, payload: Any = None) -> Answer:
        """One request; the error object, when there is one, is in `.error`."""
        async with self.session.request(method, self.url + path, headers=headers, data=body,
                                        json=payload) as response:
            content = await response.read()
            error = {}
            if response.status >= 400 and response.content_type == "application/json":
                error = (await response.json()).get("error", {})
            return Answer(response.status, {name.lower(): value for name, value in response.headers.items()},
                          content, error)

    async def chat(self, text: str = "Say hello to everybody in this room.", *, stream: bool = False,
                   headers: dict[str, str] | None = None, **more: Any) -> Answer:
        """One chat request with one user message."""
        body = {"model": "stub", "messages": [{"role": "user", "content": text}], "stream": stream, **more}
        return await self.send("POST", "/v1/chat/completions", payload=body, headers=headers)

    async def worker(self, index: int = 0) -> dict[str, Any]:
        """The index-th worker of GET /admin/workers."""
        async with self.session.get(f"{self.url}/admin/workers", headers=ADMIN) as response:
            assert response.status == 200
            return dict((await response.json())["workers"][index])

    async def metric(self, name: str) -> float:
        """The value of one series, labels included in `name` in any order; 0 when it is absent."""
        async with self.session.get(f"{self.url}/metrics") as response:
            for line in (await response.text()).splitlines():
                series, _, value = line.rpartition(" ")
                if _parts(series) == _parts(name):
                    return float(value)
        return 0.0

    async def until(self, condition: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Await `condition` until it is truthy."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not (value := await condition()):
            assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
            await asyncio.sleep(0.01)
        return value

    async def until_exact(self, *, num_workers: int = 1) -> None:
        """Every worker ready and its events in sequence."""

        async def exact() -> bool:
            rows = [await self.worker(index) for index in range(num_workers)]
            return all(row["state"] == "ready" and row["knowledge"] == "exact" for row in rows)

        await self.until(exact, "every worker ready and exact")


def _parts(series: str) -> tuple[str, list[str]]:
    name, _, labels = series.rstrip("}").partition("{")
    return name, sorted(labels.split(","))


@asynccontextmanager
async def running_gateway(*urls: str, **settings: Any) -> AsyncIterator[GatewayUnderTest]:
    """A gateway in front of these workers, with short intervals."""
    defaults: dict[str, Any] = {"port": 0, "admin_token": "admin", "health_interval_s": 0.05,
                                "worker_token": WORKER_TOKEN}
    workers = tuple(WorkerSpec(url) for url in urls)
    gateway = Gateway(GatewayConfig(workers=workers, **{**defaults, **settings}))
    try:
        await gateway.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            yield GatewayUnderTest(gateway, session)
    finally:
        await gateway.aclose()
