"""The live socket: every message, in order, whoever reads when; silence is told of."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import zmq.asyncio
from zmq.sugar.socket import Socket

from gateway.knowledge.live_socket import LiveSocket

LONG_S = 30.0


@contextlib.asynccontextmanager
async def sockets() -> AsyncIterator[tuple[zmq.asyncio.Socket, LiveSocket]]:
    """A publisher, and its subscriber, connected."""
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    subscriber = context.socket(zmq.SUB, socket_class=Socket)
    publisher.bind("tcp://127.0.0.1:0")
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(publisher.getsockopt(zmq.LAST_ENDPOINT).decode())
    try:
        await publisher.recv_multipart()   # the subscription has arrived
        with contextlib.closing(LiveSocket(subscriber)) as live:
            yield publisher, live
    finally:
        subscriber.close(0)
        publisher.close(0)
        context.term()


async def send(publisher: zmq.asyncio.Socket, *numbers: int) -> None:
    for number in numbers:
        await publisher.send_multipart([b"topic", str(number).encode()])


async def read(live: LiveSocket, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        received = await live.receive(7, LONG_S)
        assert 1 <= len(received) <= 7
        numbers += [int(number) for _, number in received]
    return numbers


async def test_messages_that_wait_and_messages_that_come_alone() -> None:
    async with sockets() as (publisher, live):
        await send(publisher, *range(50))
        assert await read(live, 50) == [*range(50)]
        for number in range(20):
            reading = asyncio.create_task(read(live, 1))
            await asyncio.sleep(0)
            await send(publisher, number)
            assert await reading == [number]


async def test_messages_that_come_while_nobody_reads() -> None:
    async with sockets() as (publisher, live):
        for start in range(0, 40, 10):
            await send(publisher, *range(start, start + 5))
            assert await read(live, 5) == [*range(start, start + 5)]
            await send(publisher, *range(start + 5, start + 10))
            await asyncio.sleep(0.01)
            assert await read(live, 5) == [*range(start + 5, start + 10)]


async def test_silence_and_a_reader_that_gave_up_lose_nothing() -> None:
    async with sockets() as (publisher, live):
        assert await live.receive(7, 0.001) == []
        reading = asyncio.create_task(live.receive(7, LONG_S))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await send(publisher, 1, 2, 3)
        assert await read(live, 3) == [1, 2, 3]
        assert await live.receive(7, 0.001) == []


async def test_a_flood_leaves_the_loop_to_others_in_between() -> None:
    async with sockets() as (publisher, live):
        await send(publisher, *range(70))
        first = await live.receive(1, LONG_S)
        await asyncio.sleep(0.05)   # the rest has come
        num_turns, seen = 0, []

        async def watch() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        numbers = [int(number) for _, number in first]
        while len(numbers) < 70:
            numbers += [int(number) for _, number in await live.receive(7, LONG_S)]
            seen.append(num_turns)
        watcher.cancel()
        assert numbers == [*range(70)]
        assert all(later > before for before, later in itertools.pairwise(seen))
