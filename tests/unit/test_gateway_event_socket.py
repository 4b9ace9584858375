"""A connection to an event socket: every message, in order, whoever reads when; silence is told of."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio

from gateway.knowledge import event_socket
from gateway.knowledge.event_socket import EventSocket, EventSocketLost
from gateway.knowledge.zmtp import dealer, subscriber
from loadtests.local_stack import free_port

LONG_S = 30.0


async def open_live(address: str, topic: bytes, within_s: float) -> EventSocket:
    return await EventSocket.connected(address, lambda: subscriber(topic), within_s)


@contextlib.asynccontextmanager
async def sockets() -> AsyncIterator[tuple[zmq.asyncio.Socket, EventSocket]]:
    """A publisher, and its subscriber, connected."""
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.bind("tcp://127.0.0.1:0")
    try:
        address = publisher.getsockopt(zmq.LAST_ENDPOINT).decode()
        with contextlib.closing(await open_live(address, b"", LONG_S)) as live:
            await publisher.recv_multipart()   # the subscription has arrived
            yield publisher, live
    finally:
        publisher.close(0)
        context.term()


async def send(publisher: zmq.asyncio.Socket, *numbers: int) -> None:
    for number in numbers:
        await publisher.send_multipart([b"topic", str(number).encode()])


async def read(live: EventSocket, count: int) -> list[int]:
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


async def test_what_comes_alone_is_offered_while_a_reader_waits() -> None:
    async with sockets() as (publisher, live):
        offered: list[int] = []
        odd = asyncio.Event()

        def take_alone(message: list[bytes]) -> bool:
            offered.append(number := int(message[1]))
            if number % 2:
                odd.set()
            return bool(number % 2)

        live.take_alone = take_alone
        reading = asyncio.create_task(live.receive(7, LONG_S))
        await asyncio.sleep(0)
        await send(publisher, 1)
        await odd.wait()
        assert not reading.done()
        await send(publisher, 2)
        assert await reading == [[b"topic", b"2"]]
        assert offered == [1, 2]
        await send(publisher, 3)
        await asyncio.sleep(0.01)   # nobody reads
        assert await live.receive(7, LONG_S) == [[b"topic", b"3"]]
        assert offered == [1, 2]


async def test_what_taking_it_raises_is_the_readers() -> None:
    async with sockets() as (publisher, live):
        def take_alone(message: list[bytes]) -> bool:
            raise ZeroDivisionError

        live.take_alone = take_alone
        reading = asyncio.create_task(live.receive(7, LONG_S))
        await asyncio.sleep(0)
        await send(publisher, 1)
        with pytest.raises(ZeroDivisionError):
            await reading


async def test_whoever_waits_hears_of_the_end() -> None:
    async with sockets() as (publisher, live):
        publisher.close(0)
        with pytest.raises(EventSocketLost, match="closed"):
            await live.lost()


async def test_more_than_there_is_room_for_waits_with_the_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_socket, "WAITING_MAX_BYTES", 1000)
    async with sockets() as (publisher, live):
        numbers = [*range(300)]
        for number in numbers:
            await publisher.send_multipart([bytes(10_000), str(number).encode()])
        await asyncio.sleep(0.05)
        assert await read(live, len(numbers)) == numbers


async def test_a_publisher_may_come_later_and_ask_whether_we_live() -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.HEARTBEAT_IVL, 20)
    publisher.setsockopt(zmq.HEARTBEAT_TIMEOUT, 100)
    port = free_port()
    opening = asyncio.create_task(open_live(f"tcp://localhost:{port}", b"topic", LONG_S))
    try:
        await asyncio.sleep(2 * event_socket.RETRY_S)
        publisher.bind(f"tcp://127.0.0.1:{port}")
        with contextlib.closing(await opening) as live:
            assert await publisher.recv_multipart() == [b"\x01topic"]
            await asyncio.sleep(0.3)
            await send(publisher, 1)
            assert await read(live, 1) == [1]
    finally:
        publisher.close(0)
        context.term()


async def test_a_path_will_do(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.bind(f"ipc://{tmp_path}/events")
    try:
        with contextlib.closing(await open_live(f"ipc://{tmp_path}/events", b"", LONG_S)) as live:
            await publisher.recv_multipart()
            await send(publisher, 1)
            assert await read(live, 1) == [1]
    finally:
        publisher.close(0)
        context.term()


@pytest.mark.parametrize("kind", [zmq.REP, zmq.PUSH])
async def test_another_kind_of_socket_is_no_publisher(kind: int) -> None:
    context = zmq.asyncio.Context()
    other = context.socket(kind)
    other.bind("tcp://127.0.0.1:0")
    try:
        with pytest.raises(TimeoutError):
            await open_live(other.getsockopt(zmq.LAST_ENDPOINT).decode(), b"", 0.3)
    finally:
        other.close(0)
        context.term()


async def test_an_address_that_is_none_is_not_tried_for_ever() -> None:
    with pytest.raises(TimeoutError):
        await open_live("inproc://events", b"", 0.05)


async def test_a_router_is_asked_and_answers_in_order() -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    try:
        address = router.getsockopt(zmq.LAST_ENDPOINT).decode()
        with contextlib.closing(await EventSocket.connected(address, dealer, LONG_S)) as socket:
            for number in range(3):
                socket.send([b"", str(number).encode(), b"x" * 70_000])
                identity, *request = await router.recv_multipart()
                assert request == [b"", str(number).encode(), b"x" * 70_000]
                for part in range(20):
                    await router.send_multipart([identity, b"", str(part).encode()])
                assert await read(socket, 20) == [*range(20)]
            assert await socket.receive(7, 0.001) == []
    finally:
        router.close(0)
        context.term()
