"""Real sockets: what a subscriber hears, what a replay gives back, and that a snapshot's barrier is exact."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from worker.protocol.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ReplayEnd,
    ReplayItem,
    decode_batch,
    encode_replay_request,
    parse_live_message,
    parse_replay_reply,
)
from worker.server import events_publisher
from worker.server.events_publisher import EventsPublisher, PortTakenError

TOPIC = "kv@127.0.0.1:1@tiny"
WAIT_S = 10.0


def stored(number: int, parent: int | None = None) -> BlockStored:
    return BlockStored(block_hashes=(number,), parent_block_hash=parent, token_ids=(number, number), block_size=2)


@pytest.fixture
async def publisher() -> AsyncIterator[EventsPublisher]:
    publisher = EventsPublisher("127.0.0.1", 0)
    publisher.open(topic=TOPIC)
    yield publisher
    await publisher.close()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(0)


async def replay(context: zmq.asyncio.Context, endpoint: str, start_seq: int) -> list[ReplayItem]:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    await dealer.send_multipart(encode_replay_request(start_seq))
    items: list[ReplayItem] = []
    async with asyncio.timeout(WAIT_S):
        while not isinstance(reply := parse_replay_reply(await dealer.recv_multipart()), ReplayEnd):
            items.append(reply)
    dealer.close(0)
    return items


async def test_sequence_0_clears_and_every_batch_carries_the_epoch(publisher: EventsPublisher, context: Any) -> None:
    publisher.publish([stored(1)])
    items = await replay(context, publisher.replay_endpoint, 0)
    batches = [decode_batch(item.payload) for item in items]
    assert [item.seq for item in items] == [0, 1]
    assert isinstance(batches[0].events[0], AllBlocksCleared)
    assert {batch.epoch for batch in batches} == {publisher.epoch}


async def test_a_subscriber_hears_what_is_published(publisher: EventsPublisher, context: Any) -> None:
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(publisher.endpoint)
    message = None
    async with asyncio.timeout(WAIT_S):
        number = 1
        while message is None:      # a subscription takes effect a moment after connect; publish until it has
            publisher.publish([stored(number)])
            number += 1
            if await subscriber.poll(20):
                message = parse_live_message(await subscriber.recv_multipart())
    assert message.topic == TOPIC.encode()
    event = decode_batch(message.payload).events[0]
    assert isinstance(event, BlockStored)
    assert event.block_hashes == (message.seq,), "batch n stored block n: the number and the content belong together"
    subscriber.close(0)


async def test_replay_starts_where_it_is_asked_to(publisher: EventsPublisher, context: Any) -> None:
    for number in range(1, 6):
        publisher.publish([stored(number)])
    assert [item.seq for item in await replay(context, publisher.replay_endpoint, 4)] == [4, 5]
    assert await replay(context, publisher.replay_endpoint, 99) == []


async def test_the_ring_forgets_its_oldest_batches(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    monkeypatch.setattr(events_publisher, "RING_BATCHES_MAX", 3)
    publisher = EventsPublisher("127.0.0.1", 0)
    publisher.open(topic="")
    for number in range(1, 6):
        publisher.publish([stored(number)])
    assert [item.seq for item in await replay(context, publisher.replay_endpoint, 0)] == [3, 4, 5]
    await publisher.close()


async def test_nonsense_on_the_replay_socket_is_survived(publisher: EventsPublisher, context: Any) -> None:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"x", b"y", b"z"], [b"", b"\x00" * 9]):
        await dealer.send_multipart(frames)
    assert [item.seq for item in await replay(context, publisher.replay_endpoint, 0)] == [0]
    dealer.close(0)


async def test_an_empty_batch_takes_no_number(publisher: EventsPublisher) -> None:
    publisher.publish([])
    assert publisher.snapshot().barrier_seq == 1, "only the clearing batch 0 lies before the barrier"


async def test_snapshot_plus_later_batches_equals_everything(publisher: EventsPublisher, context: Any) -> None:
    publisher.publish([stored(1), stored(2, 1)])
    snapshot = publisher.snapshot()
    publisher.publish([BlockRemoved(block_hashes=(2,)), stored(3, 1)])
    held = {block.block_hashes[0] for block in snapshot.blocks}
    assert held == {1, 2}
    for item in await replay(context, publisher.replay_endpoint, snapshot.barrier_seq):
        for event in decode_batch(item.payload).events:
            if isinstance(event, BlockStored):
                held |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held -= set(event.block_hashes)
    assert held == {block.block_hashes[0] for block in publisher.snapshot().blocks} == {1, 3}


async def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"127\.0\.0\.1:{port}.*--events-port"):
            EventsPublisher("127.0.0.1", port)


async def test_two_publishers_have_different_epochs() -> None:
    first, second = EventsPublisher("127.0.0.1", 0), EventsPublisher("127.0.0.1", 0)
    assert first.epoch != second.epoch
    await first.close()
    await second.close()
