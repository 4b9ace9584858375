"""Streams in the express lane, to their end or handed over at every point: the very bytes of the usual way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import orjson
import pytest
from aiohttp import web

from gateway.relay.sse import error_event
from tests.scenarios.test_express_lane import WAIT_S, Client, chat, connected, counted, in_lane, same_parts, serving
from tests.support.gateway_in_process import GatewayUnderTest
from tests.support.stub_worker import Behaviour, Seen, StubWorker, open_stream
from worker.protocol.internal_request import TOKEN_IDS_HEADER, TOKEN_IDS_IN_COMMENTS
from worker.protocol.told_tokens import encode_told

NUM_EVENTS = 4
NUM_LARGE, LARGE_BYTES = 300, 65_536    # more than the sockets' buffers hold
EVENTS = [*(b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": {"content": f"{number} \u00e9"}}]}) + b"\n\n"
            for number in range(NUM_EVENTS - 1)), b"data: [DONE]\n\n"]
WHOLE = b"".join(EVENTS)
PROBE = b"3\r\n:\n\n\r\n"     # to a client that may have left
SERVED = 'route="/v1/chat/completions",model="stub",code="200"'


class Steps:
    """A stream of which each event is sent when the one before is with the client, in as many pieces as are said."""

    def __init__(self, *, told: bool, torn_at: int | None = None, events: list[bytes] = EVENTS) -> None:
        self.told = told
        self.torn_at = torn_at
        self.events = events
        self.may_send: asyncio.Semaphore = asyncio.Semaphore(0)

    async def __call__(self, stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, {TOKEN_IDS_HEADER: TOKEN_IDS_IN_COMMENTS} if self.told else {})
        for number, event in enumerate(self.events):
            await self.may_send.acquire()
            data = (encode_told(0, 1, [number]) if self.told else b"") + event
            cut = len(data) - 9 if number == self.torn_at else len(data)
            await response.write(data[:cut])
            if cut < len(data):
                await self.may_send.acquire()
                await response.write(data[cut:])
        await self.may_send.acquire()
        await response.write_eof()
        return response


async def read_events(client: Client, steps: Steps, first: int, last: int) -> bytes:
    """Let so many come, and await each."""
    found = b""
    async with asyncio.timeout(WAIT_S):
        for event in EVENTS[first:last]:
            steps.may_send.release()
            found += await client.reader.readuntil(event[-9:] + b"\r\n")
    return found


async def rest(client: Client, steps: Steps) -> bytes:
    for _ in range(3):
        steps.may_send.release()
    async with asyncio.timeout(WAIT_S):
        return await client.reader.readuntil(b"0\r\n\r\n")


def body_of(found: bytes) -> bytes:
    """Without head and framing."""
    _, _, framed = found.partition(b"\r\n\r\n")
    chunks, at = [], 0
    while True:
        end = framed.index(b"\r\n", at)
        size, at = int(framed[at:end], 16), end + 2
        assert framed[at + size:at + size + 2] == b"\r\n"
        if not size:
            assert at + 2 == len(framed)
            return b"".join(chunks)
        chunks.append(framed[at:at + size])
        at += size + 2


async def inflight(gateway: GatewayUnderTest) -> float:
    return await gateway.metric(f'headstart_inflight{{worker="{(await gateway.worker())["id"]}"}}')


@pytest.mark.parametrize("told", [False, True])
async def test_a_stream_goes_its_whole_way_in_the_lane(told: bool) -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        for way in ("lane", "usual"):
            steps = Steps(told=told)
            stub.next_behaviours.append(steps)
            before = await counted(gateway, "answered")
            async with connected(gateway) as stranger:
                asking = client if way == "lane" else stranger
                asking.writer.write(chat("go", headers="" if way == "lane" else "x-new: 1\r\n", stream=True))
                found = await read_events(asking, steps, 0, NUM_EVENTS) + await rest(asking, steps)
            assert body_of(found) == WHOLE
            assert await counted(gateway, "answered") == before + (way == "lane")
            if way == "lane":
                in_the_lane = found
        assert same_parts(in_the_lane) == same_parts(found), "and nobody can tell"
        assert b" 200 OK" in await client.ask(chat("and the next")), "the connection serves another"
        assert await inflight(gateway) == 0
        assert await gateway.metric(f"headstart_requests_total{{{SERVED}}}") == 5


async def pipelines(client: Client, gateway: GatewayUnderTest) -> None:
    client.writer.write(chat("one more"))


async def closes_its_half(client: Client, gateway: GatewayUnderTest) -> None:
    client.writer.write_eof()


async def waits(client: Client, gateway: GatewayUnderTest) -> None:
    before = await counted(gateway, "handed_over")
    await gateway.until(lambda: _more(gateway, before), "the silent stream is handed over")


async def _more(gateway: GatewayUnderTest, before: float) -> bool:
    return await counted(gateway, "handed_over") > before


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("happens", [pipelines, closes_its_half, waits])
async def test_a_stream_that_is_handed_over_loses_nothing(
        happens: Callable[[Client, GatewayUnderTest], Awaitable[None]], told: bool) -> None:
    async with serving() as (stub, gateway):
        for point in (range(1, NUM_EVENTS) if happens is not waits else (2,)):
            async with in_lane(gateway) as client:
                steps = Steps(told=told)
                stub.next_behaviours.append(steps)
                before = await counted(gateway, "handed_over")
                client.writer.write(chat("go", stream=True))
                found = await read_events(client, steps, 0, point)
                await happens(client, gateway)
                found += await read_events(client, steps, point, NUM_EVENTS) + await rest(client, steps)
                assert body_of(found.replace(PROBE, b"")) == WHOLE
                assert await counted(gateway, "handed_over") == before + 1
                if happens is pipelines:
                    assert b" 200 OK" in await client.answer()
                elif happens is waits:
                    assert b" 200 OK" in await client.ask(chat("and the next"))
        await gateway.until(lambda: _is_at_rest(gateway), "nothing is left")


async def _is_at_rest(gateway: GatewayUnderTest) -> bool:
    return await inflight(gateway) == 0


@pytest.mark.parametrize("told", [False, True])
async def test_an_event_in_pieces_is_whole_for_the_client(told: bool) -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        for torn_at in range(NUM_EVENTS):
            steps = Steps(told=told, torn_at=torn_at)
            stub.next_behaviours.append(steps)
            client.writer.write(chat("go", stream=True))
            found = await read_events(client, steps, 0, torn_at)
            steps.may_send.release()
            found += await read_events(client, steps, torn_at, NUM_EVENTS) + await rest(client, steps)
            assert body_of(found) == WHOLE
        assert b" 200 OK" in await client.ask(chat("and the next"))
        assert await inflight(gateway) == 0


async def test_a_stream_without_done_ends_as_ever() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        for cut in range(1, NUM_EVENTS):
            steps = Steps(told=False, events=EVENTS[:cut])
            stub.next_behaviours.append(steps)
            client.writer.write(chat("go", stream=True))
            found = await read_events(client, steps, 0, cut) + await rest(client, steps)
            assert body_of(found).startswith(b"".join(EVENTS[:cut]) + error_event(b"")[:20])
            assert b'"code":"worker_failed"' in found
        assert await inflight(gateway) == 0


@pytest.mark.parametrize("told", [False, True])
async def test_what_has_been_said_to_its_end_ends_though_the_worker_says_no_more(told: bool) -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        for kind in ("lane", "usual"):
            steps = Steps(told=told)
            stub.next_behaviours.append(steps)
            client.writer.write(chat("go", headers="" if kind == "lane" else "x-new: 1\r\n", stream=True))
            found = await read_events(client, steps, 0, NUM_EVENTS)
            async with asyncio.timeout(WAIT_S):
                found += await client.reader.readuntil(b"0\r\n\r\n")
            assert body_of(found.replace(PROBE, b"")) == WHOLE
        assert b" 200 OK" in await client.ask(chat("and the next"))
        assert await inflight(gateway) == 0


async def test_a_client_that_leaves_its_stream_takes_it_along() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        steps = Steps(told=False)
        stub.next_behaviours.append(steps)
        client.writer.write(chat("go", stream=True))
        await read_events(client, steps, 0, 2)
        client.writer.transport.abort()
        async with asyncio.timeout(WAIT_S):
            await stub.seen[-1].left_early.wait()
        await gateway.until(lambda: gateway.metric("headstart_client_disconnects_total"), "it is counted")
        await gateway.until(lambda: _is_at_rest(gateway), "nothing is left")


async def test_a_stop_ends_a_stream_in_words() -> None:
    behaviour: Behaviour
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        behaviour = steps = Steps(told=False)
        stub.next_behaviours.append(behaviour)
        client.writer.write(chat("go", stream=True))
        found = await read_events(client, steps, 0, 2)
        hurry = asyncio.Event()
        hurry.set()
        await gateway.gateway.drain(hurry, delay_s=0.0)
        await gateway.gateway.aclose()
        async with asyncio.timeout(WAIT_S):
            found += await client.reader.readuntil(b"0\r\n\r\n")
            assert await client.reader.read() == b""
        assert body_of(found).startswith(b"".join(EVENTS[:2]) + b"\n\nevent: error\ndata: ")


async def large_events(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await open_stream(request, {})
    for number in range(NUM_LARGE):
        await response.write(b"data: %d %b\n\n" % (number, b"x" * LARGE_BYTES))
    await response.write(EVENTS[-1])
    await response.write_eof()
    return response


async def test_a_client_that_reads_slowly_is_waited_for_and_gets_everything() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.append(large_events)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(chat("go", stream=True))
        await gateway.until(lambda: _more(gateway, 0), "a chunk has to wait for its client")
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        pieces = [b""]
        async with asyncio.timeout(WAIT_S):
            while not b"".join(pieces[-2:]).endswith(b"\r\n0\r\n\r\n"):
                pieces.append(await client.reader.read(1 << 20))
        body = body_of(b"".join(pieces))
        assert [len(event) for event in body.split(b"\n\n")] == [len(b"data: %d " % number) + LARGE_BYTES for number
                                                                in range(NUM_LARGE)] + [len("data: [DONE]"), 0]
        assert await inflight(gateway) == 0
