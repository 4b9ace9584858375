"""The express lane on real sockets: who takes it, that nobody can tell, and that what is unusual leaves it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from gateway.server.companions import TOGETHER_MAX
from tests.integration.test_gateway_tenants import KEY_A, KEY_C, as_key, keys_file
from tests.property.test_prefix_encoder_properties import tokenizer_named
from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import (
    Behaviour,
    Seen,
    StubWorker,
    answer,
    close_before_first_byte,
    events_of,
    never_answer,
    refuse,
    running,
)
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat
from worker.prompt.tokenizer import TokenizerBundle

WAIT_S = 20.0
_DIFFERS = re.compile(rb"(?i)(date|server|x-request-id|x-headstart-matched-tokens): [^\r]*")


class Client:
    """One connection that says exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes) -> bytes:
        """The whole answer to `data`."""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> bytes:
        """The next whole answer, interim ones passed over; one with a stream up to its last chunk."""
        async with asyncio.timeout(WAIT_S):
            while (head := await self.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 "):
                pass
            length = re.search(rb"(?i)content-length: (\d+)", head)
            rest = await (self.reader.readuntil(b"0\r\n\r\n") if length is None
                          else self.reader.readexactly(int(length[1])))
        return head + rest


@asynccontextmanager
async def serving(*, num_workers: int = 1, bundle: TokenizerBundle | None = None,
                  **settings: object) -> AsyncIterator[tuple[StubWorker, GatewayUnderTest]]:
    stubs = [StubWorker(worker_token=WORKER_TOKEN, bundle=bundle) for _ in range(num_workers)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), **settings) as gateway:
        await gateway.until_exact(num_workers=num_workers)
        yield stubs[0], gateway


@asynccontextmanager
async def connected(gateway: GatewayUnderTest) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def in_lane(gateway: GatewayUnderTest, headers: str = "") -> AsyncIterator[Client]:
    """A connection whose head is known, to a gateway that has a kept connection to its worker."""
    async with connected(gateway) as client:
        for text in ("first", "second"):
            assert b" 200 OK" in await client.ask(chat(text, headers))
        yield client


def chat(text: str = "hello", headers: str = "", **more: object) -> bytes:
    return post(orjson.dumps({"model": "stub", "messages": [{"role": "user", "content": text}], **more}), headers)


def post(body: bytes, headers: str = "") -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def counted(gateway: GatewayUnderTest, outcome: str) -> float:
    return await gateway.metric(f'headstart_express_requests_total{{outcome="{outcome}"}}')


def same_parts(found: bytes) -> tuple[list[bytes], bytes]:
    head, _, body = found.partition(b"\r\n\r\n")
    return sorted(line for line in _DIFFERS.sub(b"", head).lower().split(b"\r\n") if line), body


@pytest.mark.parametrize(("data", "outcome"), [
    (chat("hello"), "answered"), (chat("x" * 3000), "handed_over"), (chat("hello", n=2, temperature=0.5), "answered"),
    (chat("hi", headers="Origin: http://a\r\n"), "answered"),
    (chat("hello", temperature=9), "refused"), (chat("hello", model="unknown"), "refused"), (post(b"{"), "refused"),
    (chat("hello", headers="x-request-deadline-ms: soon\r\n"), "refused"), (chat("word " * 2000), "handed_over"),
    (post(b'{"model":"a","model":"a"}'), "refused"),
], ids=range(10))
async def test_an_answer_is_the_same_by_either_way(data: bytes, outcome: str) -> None:
    async with serving(cors_origins=("http://a",)) as (stub, gateway), in_lane(gateway) as client:
        await client.ask(data)  # from now on its head is known, and its prompt
        await gateway.until(lambda: cached(gateway, stub), "the events have told what is cached")
        before = await counted(gateway, outcome)
        express = await client.ask(data)
        assert await counted(gateway, outcome) == before + 1
        async with connected(gateway) as other:
            # A head that nobody has sent before is aiohttp's to read.
            usual = await other.ask(data.replace(b"Host: x", b"Host: y"))
        assert same_parts(express) == same_parts(usual)
        assert await gateway.metric('headstart_inflight{worker="' + (await gateway.worker())["id"] + '"}') == 0


@pytest.mark.parametrize("pieces", [[1], [60, 61], [150, 300], [-1], [-2, -1]], ids=str)
async def test_a_request_in_pieces_is_one_request(pieces: list[int]) -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        data, at = chat("in pieces " * 20), 0
        for end in [*(len(data) + piece if piece < 0 else piece for piece in pieces), len(data)]:
            client.writer.write(data[at:end])
            await client.writer.drain()
            await asyncio.sleep(0.02)
            at = end
        assert b" 200 OK" in await client.answer()
        assert b" 200 OK" in await client.ask(chat("and the next"))
        assert len(stub.seen) == 4


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.append(slow)
        client.writer.write(chat("one", user="1"))
        await gateway.until(lambda: seen(stub, 3), "the first is with the worker")
        client.writer.write(chat("two") + chat("three", temperature=9) + chat("four", headers="x-new: 1\r\n"))
        statuses = [(await client.answer()).split(b" ", 2)[1] for _ in range(4)]
        assert statuses == [b"200", b"200", b"400", b"200"]
        assert await counted(gateway, "handed_over") == 1
        assert len(stub.seen) == 5, "each was sent once"


async def test_long_chats_that_begin_alike_are_what_they_were() -> None:
    bundle = tokenizer_named("tiny").bundle
    async with serving(bundle=bundle) as (stub, gateway), in_lane(gateway) as client:
        front = {"role": "system", "content": "as ever " * 600}
        chats = [[front, {"role": "user", "content": f"and {number}"}] for number in range(6)]
        bodies = [orjson.dumps({"model": "stub", "seed": 1, "messages": messages}) for messages in chats]
        for body in bodies:
            assert b" 200 OK" in await client.ask(post(body))
        assert await gateway.metric("headstart_chat_beginnings_found_total") >= 3
        assert await gateway.metric("headstart_chat_beginnings_bytes") > 3 * 4800
        renderer = PromptRenderer(bundle)
        assert [seen.prompt for seen in stub.seen[-6:]] == [renderer.chat(parse_chat(body)) for body in bodies]
        assert b'"param":"seed"' in await client.ask(post(bodies[0][:-1] + b',"seed":2}'))


async def test_more_than_take_their_steps_together_are_all_answered() -> None:
    async with serving() as (stub, gateway), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(in_lane(gateway)) for _ in range(TOGETHER_MAX + 8)]
        before = await counted(gateway, "answered")
        for number, client in enumerate(clients):
            client.writer.write(chat(f"all at once, {number}"))
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert all(b" 200 OK" in found for found in answers)
        assert len(stub.seen) == 3 * len(clients)
        assert await counted(gateway, "answered") > before, "some find a kept connection"


async def test_a_half_closed_client_in_the_lane_gets_its_answer() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.append(slow)
        client.writer.write(chat("last words"))
        await gateway.until(lambda: seen(stub, 3), "it is with the worker")
        client.writer.write_eof()
        assert b" 200 OK" in await client.answer()
        assert len(stub.seen) == 3


async def test_a_client_that_leaves_the_lane_takes_its_request_along() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.append(never_answer)
        client.writer.write(chat("never mind"))
        await gateway.until(lambda: seen(stub, 3), "it is with the worker")
        client.writer.transport.abort()
        async with asyncio.timeout(WAIT_S):
            await stub.seen[-1].left_early.wait()
        await gateway.until(lambda: gateway.metric("headstart_client_disconnects_total"), "it is counted")
        worker = (await gateway.worker())["id"]
        assert await gateway.metric(f'headstart_inflight{{worker="{worker}"}}') == 0


@pytest.mark.parametrize(("behaviours", "status"), [
    ([close_before_first_byte], 200), ([refuse(500, "broken")], 502), ([refuse(429, "busy")], 429),
    ([refuse(422, "odd")], 422), ([close_before_first_byte] * 9, 502),
], ids=["dies", "500", "429", "422", "dies again"])
async def test_a_worker_that_fails_is_the_usual_ways_to_replace(behaviours: list[Behaviour], status: int) -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.extend(behaviours)
        found = await client.ask(chat("try"))
        assert found.split(b" ", 2)[1] == b"%d" % status
        assert await counted(gateway, "handed_over") == 1


async def test_a_long_wait_is_handed_over_and_goes_on() -> None:
    async with serving(first_byte_timeout_s=0.5) as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.append(never_answer)
        found = await client.ask(chat("too long"))
        assert found.split(b" ", 2)[1] == b"504"
        assert b"The worker sent nothing for 0.5 s" in found, "and not which: --expose-routing may be off"
        assert await counted(gateway, "handed_over") == 1
        stub.next_behaviours.append(never_answer)
        late = await client.ask(chat("too late", headers="x-request-deadline-ms: 300\r\n"))
        assert late.split(b" ", 2)[1] == b"504"


async def test_a_key_that_is_taken_away_opens_nothing_any_more(tmp_path: Path) -> None:
    head = f"Authorization: Bearer {KEY_A}\r\n"
    file = keys_file(tmp_path, {"id": "a", "key": KEY_A})
    async with serving(keys_file=file) as (_, gateway), in_lane(gateway, head) as client:
        before = await counted(gateway, "answered")
        assert b" 200 OK" in await client.ask(chat("still", head))
        assert await counted(gateway, "answered") == before + 1
        keys_file(tmp_path, {"id": "c", "key": KEY_C})
        gateway.gateway.reload()
        assert b" 401 " in await client.ask(chat("no more", head))
        assert (await gateway.chat(headers=as_key(KEY_C))).status == 200


async def test_limits_hold_in_the_lane_and_are_given_back(tmp_path: Path) -> None:
    head = f"Authorization: Bearer {KEY_A}\r\n"
    file = keys_file(tmp_path, {"id": "a", "key": KEY_A, "max_concurrent": 1})
    async with serving(keys_file=file) as (stub, gateway), in_lane(gateway, head) as client:
        async with in_lane(gateway, head) as other:
            stub.next_behaviours.append(slow)
            client.writer.write(chat("first", head))
            await gateway.until(lambda: seen(stub, 5), "it is with the worker")
            refused = await other.ask(chat("second", head))
            assert b" 429 " in refused
            assert b"retry-after" in refused.lower()
            assert b" 200 OK" in await client.answer()
            assert b" 200 OK" in await other.ask(chat("third", head))
        assert await gateway.metric('headstart_rejected_total{reason="concurrency"}') == 1


async def test_a_stop_answers_whoever_is_in_the_lane() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        stub.next_behaviours.append(never_answer)
        client.writer.write(chat("cut short"))
        await gateway.until(lambda: seen(stub, 3), "it is with the worker")
        hurry = asyncio.Event()
        hurry.set()
        await gateway.gateway.drain(hurry, delay_s=0.0)
        await gateway.gateway.aclose()
        found = await client.answer()
        assert b" 502 " in found
        assert b"connection: close" in found.lower()
        assert await asyncio.wait_for(client.reader.read(), WAIT_S) == b""


async def test_the_event_stream_of_a_known_head_is_whole() -> None:
    async with serving() as (stub, gateway), in_lane(gateway) as client:
        found = await client.ask(chat("stream", stream=True))
        assert b"data: [DONE]" in found
        assert events_of(stub.seen[-1])[0] in found


async def slow(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    await asyncio.sleep(0.2)
    return await answer(stub, request, seen)


async def seen(stub: StubWorker, count: int) -> bool:
    return len(stub.seen) >= count


async def cached(gateway: GatewayUnderTest, stub: StubWorker) -> bool:
    return bool((await gateway.worker())["blocks"] == len(stub.blocks))
