"""Workers that answer at once and compute nothing: the far end of the gateway benchmarks, in a process of their own.

    python -m loadtests.bench.relay_worker --port 9100 --port 9101

Each speaks enough of a headstart worker's side channel for a gateway to route to it by prefix: a small real tokenizer
and, for every request that brings token ids, a BlockStored event for the blocks that it has not announced before,
EVENT_INTERVAL_S later at most. Answers are a fixed body, or a stream of NUM_CHUNKS chunks, one every PACE_S.
Must never: parse more of a request than its length and what it asks for before it has answered.
Approximation: an announced block is never evicted, and a snapshot is empty: whoever lost events is told nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import orjson
import uvloop
from zmq.asyncio import Context
from zmq.constants import SocketOption, SocketType

from loadtests.bench.relay_prompts import MODEL, bench_bundle
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_tokenize
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, HashScheme, block_hashes, unpack_tokens
from worker.protocol.cache_events import (
    BlockStored,
    SnapshotHeader,
    encode_batch,
    encode_replay_end,
    encode_replay_reply,
    encode_snapshot_header,
)

BLOCK_SIZE = 16
NUM_CHUNKS = 64
PACE_S = 0.020
EVENT_INTERVAL_S = 0.005
MAX_ANNOUNCED = 500_000
SEND_HIGH_WATER = 1_000_000
_ANSWER = orjson.dumps({
    "id": "chatcmpl-bench", "object": "chat.completion", "created": 1, "model": MODEL,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "word " * 30}}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 30, "total_tokens": 230,
              "prompt_tokens_details": {"cached_tokens": 192}}})
_EVENT = b"data: " + orjson.dumps({
    "id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
    "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}) + b"\n\n"
_LAST = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def response(body: bytes, content_type: bytes = b"application/json", more: bytes = b"") -> bytes:
    """A whole response."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        content_type, len(body), more, body)


def chunk(data: bytes) -> bytes:
    """One chunk, framed."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _header(head: bytes, name: bytes) -> bytes | None:
    at = head.find(b"\r\n" + name + b":")
    return None if at < 0 else head[at + len(name) + 3:].split(b"\r\n", 1)[0].strip()


class SideChannel:
    """What GET /kv, /kv/snapshot, /tokenizer and POST /tokenize say, and the events."""

    def __init__(self, bundle: TokenizerBundle, epoch: str) -> None:
        self._renderer = PromptRenderer(bundle)
        self._scheme = HashScheme(block_size=BLOCK_SIZE, seed=b"bench", model=MODEL, weights="w", kv_dtype="float32",
                                  tokenizer=bundle.tokenizer_digest, template=bundle.template_digest,
                                  exactness="fast")
        self._epoch = epoch
        self._publisher, self._router = (Context.instance().socket(kind)
                                         for kind in (SocketType.PUB, SocketType.ROUTER))
        self._publisher.setsockopt(SocketOption.SNDHWM, SEND_HIGH_WATER)
        for socket in (self._publisher, self._router):
            socket.bind("tcp://127.0.0.1:*")
        endpoints = [socket.getsockopt_string(SocketOption.LAST_ENDPOINT)
                     for socket in (self._publisher, self._router)]
        self._kv = response(orjson.dumps({
            "engine": "headstart", "version": "bench", "epoch": epoch, "model": MODEL, "block_size": BLOCK_SIZE,
            "hash_scheme": self._scheme.to_wire(with_seed=True), "hash_scheme_digest": self._scheme.digest(),
            "max_context": 16384, "exactness": "fast", "kv_cache": "full",
            "events": {"endpoint": endpoints[0], "replay_endpoint": endpoints[1], "topic": ""},
            "blocks": {"total": 4_000_000, "free": 3_900_000, "cached": 100_000, "used": 0},
            "rates": {"prefill_tokens_per_s": 4000.0, "decode_step_s": 0.01}}))
        self._tokenizer = response(bundle.to_wire(), more=b'ETag: "%b"\r\n' % bundle.digest.encode())
        self._announced: dict[int, None] = {}
        self._seen: list[tuple[bytes, bytes]] = []
        self._seq = 0
        self._last: bytes | None = None

    def saw(self, head: bytes, body: bytes) -> None:
        """A request came; its blocks are announced later. Without token ids there is nothing to announce."""
        if b"x-headstart-json-bytes" in head:
            self._seen.append((head, body))

    async def announce(self) -> None:
        """Events for what was seen, a batch at a time."""
        while True:
            await asyncio.sleep(EVENT_INTERVAL_S)
            if not self._seen:
                continue
            seen, self._seen = self._seen, []
            events = [event for head, body in seen if (event := self._event(head, body)) is not None]
            while len(self._announced) > MAX_ANNOUNCED:
                del self._announced[next(iter(self._announced))]
            if events:
                payload = encode_batch(events, ts=time.time(), dp_rank=None, epoch=self._epoch)
                seq, self._last = self._seq, payload
                self._seq += 1
                await self._publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def _event(self, head: bytes, body: bytes) -> BlockStored | None:
        tokens = unpack_tokens(body[int(_header(head, b"x-headstart-json-bytes") or b"0"):])
        salt = _header(head, b"x-headstart-salt")
        keys = () if salt is None else (ExtraKey(ExtraKeyKind.GATEWAY_SALT, bytes.fromhex(salt.decode()), 0),)
        hashes = block_hashes(tokens, self._scheme, keys)
        first = next((at for at, block in enumerate(hashes) if block not in self._announced), len(hashes))
        if first == len(hashes):
            return None
        self._announced.update(dict.fromkeys(hashes[first:]))
        own_keys = tuple(keys if index == 0 else () for index in range(first, len(hashes))) if keys else ()
        return BlockStored(tuple(hashes[first:]), hashes[first - 1] if first else None,
                           tuple(tokens[first * BLOCK_SIZE:len(hashes) * BLOCK_SIZE]), BLOCK_SIZE, own_keys)

    async def serve_replays(self) -> None:
        """Only the last batch is kept: a gateway wants to hear it again now and then, to know whom it follows."""
        while True:
            identity, *_ = await self._router.recv_multipart()
            if self._last is not None:
                await self._router.send_multipart([identity, *encode_replay_reply(b"", self._seq - 1, self._last)])
            await self._router.send_multipart([identity, *encode_replay_end()])

    def answer(self, path: bytes, body: bytes) -> bytes:
        """The response to anything but a generation."""
        if path == b"/tokenize":
            tokens = self._renderer.tokenize(parse_tokenize(body))
            return response(orjson.dumps({"count": len(tokens), "tokens": tokens, "max_model_len": 16384}))
        if path == b"/kv/snapshot":
            return response(encode_snapshot_header(SnapshotHeader(
                epoch=self._epoch, barrier_seq=self._seq, block_size=BLOCK_SIZE, num_blocks=0,
                hash_scheme_digest=self._scheme.digest())))
        return {b"/kv": self._kv, b"/tokenizer": self._tokenizer}.get(path, response(b"{}"))


class WorkerConnection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, side_channel: SideChannel) -> None:
        self._side_channel = side_channel
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._num_sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, reason: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._buffer = buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = buffer[:end].lower()
        length = int(_header(head, b"content-length") or b"0")
        if len(buffer) < end + 4 + length:
            return
        self._buffer = b""
        body, path = buffer[end + 4:], head.split(b" ", 2)[1]
        if not path.startswith(b"/v1/") or path == b"/v1/models":
            self._transport.write(self._side_channel.answer(path, body))
            return
        if b'"stream":true' in body:
            self._num_sent = 0
            self._transport.write(STREAM_HEAD + chunk(_EVENT))
            self._timer = asyncio.get_running_loop().call_later(PACE_S, self._next_chunk)
        else:
            self._transport.write(response(_ANSWER, more=b"x-headstart-cached-tokens: 192\r\n"))
        self._side_channel.saw(head, body)

    def _next_chunk(self) -> None:
        self._num_sent += 1
        if self._num_sent < NUM_CHUNKS:
            self._transport.write(chunk(_EVENT))
            self._timer = asyncio.get_running_loop().call_later(PACE_S, self._next_chunk)
        else:
            self._timer = None
            self._transport.write(chunk(_LAST) + b"0\r\n\r\n")


async def _serve(ports: list[int]) -> None:
    bundle, loop = bench_bundle(), asyncio.get_running_loop()
    always = []
    for port in ports:
        side_channel = SideChannel(bundle, f"bench-{port}")
        server = await loop.create_server(lambda channel=side_channel: WorkerConnection(channel),  # type: ignore[misc]
                                          "127.0.0.1", port)
        always += [server.serve_forever(), side_channel.serve_replays(), side_channel.announce()]
    await asyncio.gather(*always)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.relay_worker",
                                     description="The far end of the gateway benchmarks: answers at once.")
    parser.add_argument("--port", type=int, required=True, action="append", help="port on 127.0.0.1; a worker each")
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
