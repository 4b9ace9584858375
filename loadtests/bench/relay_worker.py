"""A worker that answers at once and computes nothing: the far end of the relay benchmark, in a process of its own.

    python -m loadtests.bench.relay_worker --port 9100

Speaks enough of a headstart worker's side channel for a gateway to route to it by prefix: a small real tokenizer,
silent event sockets, a snapshot that holds every prompt of the benchmark. Answers are a fixed body, or a stream of
NUM_CHUNKS chunks, one every PACE_S.
Must never: parse more of a request than its length and what it asks for.
"""

from __future__ import annotations

import argparse
import asyncio

import orjson
import uvloop
from zmq.asyncio import Context
from zmq.constants import SocketOption, SocketType

from loadtests.bench.relay_prompts import MODEL, bench_bundle, bodies
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_tokenize
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.cache_events import (
    BlockStored,
    SnapshotHeader,
    encode_replay_end,
    encode_snapshot_block,
    encode_snapshot_header,
)

BLOCK_SIZE = 16
NUM_CHUNKS = 64
PACE_S = 0.020
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


class SideChannel:
    """What GET /kv, /kv/snapshot, /tokenizer and POST /tokenize say."""

    def __init__(self) -> None:
        self._bundle = bench_bundle()
        self._renderer = PromptRenderer(self._bundle)
        scheme = HashScheme(block_size=BLOCK_SIZE, seed=b"bench", model=MODEL, weights="w", kv_dtype="float32",
                            tokenizer=self._bundle.tokenizer_digest, template=self._bundle.template_digest,
                            exactness="fast")
        self._context = Context()
        sockets = [self._context.socket(kind) for kind in (SocketType.PUB, SocketType.ROUTER)]
        for socket in sockets:
            socket.bind("tcp://127.0.0.1:*")
        endpoints = [socket.getsockopt_string(SocketOption.LAST_ENDPOINT) for socket in sockets]
        self._sockets = sockets
        self._kv = response(orjson.dumps({
            "engine": "headstart", "version": "bench", "epoch": "bench", "model": MODEL, "block_size": BLOCK_SIZE,
            "hash_scheme": scheme.to_wire(with_seed=True), "hash_scheme_digest": scheme.digest(),
            "max_context": 8192, "exactness": "fast", "kv_cache": "full",
            "events": {"endpoint": endpoints[0], "replay_endpoint": endpoints[1], "topic": ""},
            "blocks": {"total": 100_000, "free": 90_000, "cached": 10_000, "used": 0},
            "rates": {"prefill_tokens_per_s": 4000.0, "decode_step_s": 0.01}}))
        blocks = self._prompt_blocks(scheme)
        header = SnapshotHeader(epoch="bench", barrier_seq=0, block_size=BLOCK_SIZE, num_blocks=len(blocks),
                                hash_scheme_digest=scheme.digest())
        self._snapshot = response(encode_snapshot_header(header) + b"".join(map(encode_snapshot_block, blocks)))
        self._tokenizer = response(self._bundle.to_wire(), more=b'ETag: "%b"\r\n' % self._bundle.digest.encode())

    def _prompt_blocks(self, scheme: HashScheme) -> list[BlockStored]:
        found: dict[int, BlockStored] = {}
        for body in bodies(stream=False):
            tokens, parent = self._renderer.chat(parse_chat(body)), None
            for index, block_hash in enumerate(block_hashes(tokens, scheme, ())):
                own = tuple(tokens[index * BLOCK_SIZE:(index + 1) * BLOCK_SIZE])
                found[block_hash] = BlockStored((block_hash,), parent, own, BLOCK_SIZE, ())
                parent = block_hash
        return list(found.values())

    async def serve_replays(self) -> None:
        """There never was an event, so every replay is empty."""
        router = self._sockets[1]
        while True:
            identity, *_ = await router.recv_multipart()
            await router.send_multipart([identity, *encode_replay_end()])

    def answer(self, path: bytes, body: bytes) -> bytes:
        """The response to anything but a generation."""
        if path == b"/tokenize":
            tokens = self._renderer.tokenize(parse_tokenize(body))
            return response(orjson.dumps({"count": len(tokens), "tokens": tokens, "max_model_len": 8192}))
        return {b"/kv": self._kv, b"/kv/snapshot": self._snapshot}.get(path, self._tokenizer)


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
        at = head.find(b"content-length:")
        length = int(head[at + 15:].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(buffer) < end + 4 + length:
            return
        self._buffer = b""
        body, path = buffer[end + 4:], head.split(b" ", 2)[1]
        if not path.startswith(b"/v1/"):
            self._transport.write(self._side_channel.answer(path, body))
        elif b'"stream":true' in body:
            self._num_sent = 0
            self._transport.write(STREAM_HEAD + chunk(_EVENT))
            self._timer = asyncio.get_running_loop().call_later(PACE_S, self._next_chunk)
        else:
            self._transport.write(response(_ANSWER, more=b"x-headstart-cached-tokens: 192\r\n"))

    def _next_chunk(self) -> None:
        self._num_sent += 1
        if self._num_sent < NUM_CHUNKS:
            self._transport.write(chunk(_EVENT))
            self._timer = asyncio.get_running_loop().call_later(PACE_S, self._next_chunk)
        else:
            self._timer = None
            self._transport.write(chunk(_LAST) + b"0\r\n\r\n")


async def _serve(port: int) -> None:
    side_channel = SideChannel()
    server = await asyncio.get_running_loop().create_server(lambda: WorkerConnection(side_channel), "127.0.0.1", port)
    await asyncio.gather(server.serve_forever(), side_channel.serve_replays())


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.relay_worker",
                                     description="The far end of the relay benchmark: answers at once.")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
