"""Servers on the event loop that a gateway has in life, in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import uvloop

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import StubWorker, running

START_S = 30.0
T = TypeVar("T")


@contextlib.contextmanager
def in_thread(open_context: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What the context yields, served until the block ends. What fails in the thread fails here."""
    started, loop, ended = threading.Event(), uvloop.new_event_loop(), asyncio.Event()
    found: list[T] = []
    problems: list[BaseException] = []

    async def serve() -> None:
        async with open_context() as inside:
            found.append(inside)
            started.set()
            await ended.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as problem:
            problems.append(problem)
            started.set()

    thread = threading.Thread(target=run, name="servers", daemon=True)
    thread.start()
    try:
        assert started.wait(START_S), "the servers did not start"
        if problems:
            raise problems[0]
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(START_S)
        loop.close()
    assert not problems, problems


@contextlib.contextmanager
def serving_in_thread(**settings: Any) -> Iterator[tuple[StubWorker, GatewayUnderTest]]:
    """A stub worker and a gateway that knows it exactly."""
    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[tuple[StubWorker, GatewayUnderTest]]:
        stub = StubWorker(worker_token=WORKER_TOKEN)
        async with running(stub), running_gateway(stub.url, **settings) as gateway:
            await gateway.until_exact()
            yield stub, gateway

    with in_thread(serving) as found:
        yield found
