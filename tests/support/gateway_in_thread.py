"""A gateway and a stub worker on an event loop in a thread of their own, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import StubWorker, running

START_S = 30.0


@contextlib.contextmanager
def serving_in_thread(**settings: Any) -> Iterator[tuple[StubWorker, GatewayUnderTest]]:
    """Ready and exact; ended with the block. What fails in the thread fails here."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    found: list[tuple[StubWorker, GatewayUnderTest]] = []
    problems: list[BaseException] = []

    async def serve(ended: asyncio.Event) -> None:
        stub = StubWorker(worker_token=WORKER_TOKEN)
        async with running(stub), running_gateway(stub.url, **settings) as gateway:
            await gateway.until_exact()
            found.append((stub, gateway))
            started.set()
            await ended.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve(ended))
        except BaseException as problem:
            problems.append(problem)
            started.set()

    ended = asyncio.Event()
    thread = threading.Thread(target=run, name="gateway", daemon=True)
    thread.start()
    try:
        assert started.wait(START_S), "the gateway did not start"
        if problems:
            raise problems[0]
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(START_S)
        loop.close()
    assert not problems, problems
