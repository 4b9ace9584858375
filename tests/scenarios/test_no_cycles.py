"""What has ended leaves nothing to Python's collector: it looks rarely, and what waits for it piles up."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from gateway.server.connections import GuardedServer
from tests.scenarios.test_express_lane import chat, connected, serving
from tests.support.gateway_in_process import GatewayUnderTest

NUM_REQUESTS = 10


async def ask(gateway: GatewayUnderTest, *, stream: bool = False, half_closes: bool = False) -> None:
    """By a client of its own: two requests, the second of which finds its head known; or one and an end."""
    async with connected(gateway) as client:
        for _ in range(1 if half_closes else 2):
            client.writer.write(chat(stream=stream))
            if half_closes:
                client.writer.write_eof()
            assert b" 200 OK" in await client.answer()


async def leave(gateway: GatewayUnderTest) -> None:
    """In the middle of a stream."""
    async with connected(gateway) as client:
        client.writer.write(chat(stream=True))
        await client.reader.readuntil(b"\r\n\r\n")


ASKING: dict[str, Callable[[GatewayUnderTest], Awaitable[None]]] = {
    "whole": ask, "stream": lambda gateway: ask(gateway, stream=True),
    "half-closed": lambda gateway: ask(gateway, half_closes=True),
    "half-closed stream": lambda gateway: ask(gateway, stream=True, half_closes=True), "leaving": leave}


async def until_unconnected(gateway: GatewayUnderTest) -> None:
    """No client is left but the test's own session."""
    server = gateway.gateway._runners[0].server
    assert isinstance(server, GuardedServer)

    async def unconnected() -> bool:
        return server.num_open <= 1

    await gateway.until(unconnected, "no client is connected")


@contextmanager
def only_cycles() -> Iterator[Counter[str]]:
    """How many of the gateway's objects, by name, the collector alone would have freed of what ended in here."""
    found: Counter[str] = Counter()
    gc.freeze()  # the collector looks past what was there before
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("gateway."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


async def test_requests_leave_no_cycles() -> None:
    async with serving() as (_, gateway):
        for kind, asking in ASKING.items():
            await asking(gateway)
            await until_unconnected(gateway)
            with only_cycles() as found:
                for _ in range(NUM_REQUESTS):
                    await asking(gateway)
                await until_unconnected(gateway)
            assert [name for name, count in found.items() if count >= NUM_REQUESTS] == [], kind
