"""A worker for the soak that computes nothing and forgets nothing: SSE answers, a pool of blocks, and its KV events.

    python -m loadtests.soak_worker --port 9100

The answer is a function of the number in the request, so that a client can tell a wrong one. Blocks of every prompt
are held, published in vLLM's format and evicted, oldest first; whoever missed one finds a snapshot and replays.
Must never: be right about load or speed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
from collections import OrderedDict, deque

import orjson
import uvloop
from zmq.asyncio import Context
from zmq.constants import Flag, SocketOption, SocketType
from zmq.error import Again

from loadtests.bench.relay_prompts import MODEL, bench_bundle
from loadtests.bench.relay_worker import chunk, response
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_tokenize
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.cache_events import (
    BlockRemoved,
    BlockStored,
    CacheEvent,
    SnapshotHeader,
    encode_batch,
    encode_live_message,
    encode_replay_end,
    encode_replay_reply,
    encode_snapshot_block,
    encode_snapshot_header,
    parse_replay_request,
)
from worker.protocol.internal_request import CACHED_TOKENS_HEADER, WORKER_TOKEN_HEADER, decode_internal

BLOCK_SIZE = 16
BLOCKS_MAX = 4096
RING_BATCHES = 2000
FLUSH_S = 0.005
PACE_S = 0.004
LARGE_BYTES = 300_000
_NUMBER = re.compile(rb"#(\d+)(@?)")
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n%b: %d\r\n\r\n"
_EVENT = (b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,'
          b'"delta":{"content":"%b"},"finish_reason":null}]}\n\n')
_WHOLE = (b'{"id":"c","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
          b'"finish_reason":"stop","message":{"role":"assistant","content":"%b"}}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,'
          b'"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}')


def answer_words(number: int, *, is_large: bool) -> list[bytes]:
    """What the answer to request `number` says, event by event."""
    words = [b"%d:" % number, *(b" w%d" % (number * step % 997) for step in range(1, 3 + number % 4))]
    return [*words, b"x" * LARGE_BYTES] if is_large else words


class Pool:
    """Blocks by hash, oldest first, and the events that tell of them."""

    def __init__(self, scheme: HashScheme) -> None:
        self._scheme = scheme
        self._blocks: OrderedDict[int, tuple[int, BlockStored]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, tokens: list[int]) -> tuple[int, list[CacheEvent]]:
        """Hold a prompt's blocks: how many tokens were found, and what to publish."""
        hashes = block_hashes(tokens, self._scheme, ())
        num_held = 0
        for block_hash in hashes:
            if block_hash not in self._blocks:
                break
            self._blocks.move_to_end(block_hash)
            num_held += 1
        events: list[CacheEvent] = []
        new = hashes[num_held:]
        if new:
            parent = hashes[num_held - 1] if num_held else None
            start = num_held * BLOCK_SIZE
            events.append(BlockStored(tuple(new), parent, tuple(tokens[start:start + len(new) * BLOCK_SIZE]),
                                      BLOCK_SIZE, ()))
        for depth, block_hash in enumerate(new, num_held):
            own = tuple(tokens[depth * BLOCK_SIZE:(depth + 1) * BLOCK_SIZE])
            self._blocks[block_hash] = depth, BlockStored((block_hash,), hashes[depth - 1] if depth else None, own,
                                                          BLOCK_SIZE, ())
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - BLOCKS_MAX)]
        if gone:
            events.append(BlockRemoved(tuple(gone)))
        return min(num_held * BLOCK_SIZE, len(tokens) - 1), events

    def snapshot(self) -> list[BlockStored]:
        """Every block, parents first."""
        return [stored for _, stored in sorted(self._blocks.values(), key=lambda found: found[0])]


class SoakWorker:
    """One life of the worker."""

    def __init__(self) -> None:
        bundle = bench_bundle()
        self._renderer = PromptRenderer(bundle)
        self._scheme = HashScheme(block_size=BLOCK_SIZE, seed=b"soak", model=MODEL, weights="w", kv_dtype="float32",
                                  tokenizer=bundle.tokenizer_digest, template=bundle.template_digest,
                                  exactness="fast")
        self.pool = Pool(self._scheme)
        self.epoch = secrets.token_hex(8)
        self.token = os.environ["HEADSTART_WORKER_TOKEN"]
        self.num_running = 0
        self._tokenizer = response(bundle.to_wire(), more=b'ETag: "%b"\r\n' % bundle.digest.encode())
        context = Context()
        self._pub, self._router = (context.socket(kind) for kind in (SocketType.PUB, SocketType.ROUTER))
        self._endpoints = []
        for socket in (self._pub, self._router):
            socket.bind("tcp://127.0.0.1:*")
            self._endpoints.append(socket.getsockopt_string(SocketOption.LAST_ENDPOINT))
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING_BATCHES)
        self._next_seq = 0
        self._pending: list[CacheEvent] = []

    def publish(self, events: list[CacheEvent]) -> None:
        """Send them soon, together with others."""
        if events and not self._pending:
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
        self._pending += events

    def _flush(self) -> None:
        events, self._pending = self._pending, []
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload = encode_batch(events, ts=0.0, epoch=self.epoch)
        self._ring.append((seq, payload))
        frames = encode_live_message(b"", seq, payload)
        try:
            self._pub.send_multipart(frames, flags=Flag.NOBLOCK)
        except Again:
            return  # a hole, which the replay fills

    async def serve_replays(self) -> None:
        """Answer who missed something. Runs for ever."""
        while True:
            identity, *frames = await self._router.recv_multipart()
            start_seq = parse_replay_request(frames)
            for seq, payload in list(self._ring):
                if seq >= start_seq:
                    await self._router.send_multipart([identity, *encode_replay_reply(b"", seq, payload)])
            await self._router.send_multipart([identity, *encode_replay_end()])

    def side_channel(self, path: bytes, headers: dict[str, str], body: bytes) -> bytes:
        """The response to anything but a generation."""
        if path == b"/kv":
            return response(self._kv(headers.get(WORKER_TOKEN_HEADER) == self.token))
        if path == b"/kv/snapshot":
            return response(self._snapshot())
        if path == b"/tokenize":
            tokens = self._renderer.tokenize(parse_tokenize(body))
            return response(orjson.dumps({"count": len(tokens), "tokens": tokens, "max_model_len": 8192}))
        return self._tokenizer

    def _kv(self, is_accepted: bool) -> bytes:
        return orjson.dumps({
            "engine": "headstart", "version": "soak", "epoch": self.epoch, "model": MODEL, "block_size": BLOCK_SIZE,
            "internal_requests": "accepted" if is_accepted else "refused", "pid": os.getpid(),
            "hash_scheme": self._scheme.to_wire(with_seed=True), "hash_scheme_digest": self._scheme.digest(),
            "max_context": 8192, "exactness": "fast", "kv_cache": "full",
            "events": {"endpoint": self._endpoints[0], "replay_endpoint": self._endpoints[1], "topic": ""},
            "blocks": {"total": BLOCKS_MAX, "free": BLOCKS_MAX - len(self.pool), "cached": len(self.pool), "used": 0},
            "rates": {"prefill_tokens_per_s": 50_000.0, "decode_step_s": 0.004},
            "load": {"running": self.num_running}})

    def _snapshot(self) -> bytes:
        if self._pending:
            self._flush()
        blocks = self.pool.snapshot()
        header = SnapshotHeader(epoch=self.epoch, barrier_seq=self._next_seq, block_size=BLOCK_SIZE,
                                num_blocks=len(blocks), hash_scheme_digest=self._scheme.digest())
        return encode_snapshot_header(header) + b"".join(map(encode_snapshot_block, blocks))


class _Connection(asyncio.Protocol):
    """One connection of the gateway; requests come one after the other."""

    def __init__(self, worker: SoakWorker) -> None:
        self._worker = worker
        self._buffer = b""
        self._rest: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, reason: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._timer is not None:
            self._timer.cancel()
            self._worker.num_running -= 1

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._buffer = buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        line, *lines = buffer[:end].split(b"\r\n")
        headers = {name.lower().decode(): value.strip().decode() for name, _, value in
                   (entry.partition(b":") for entry in lines)}
        length = int(headers.get("content-length", 0))
        if len(buffer) < end + 4 + length:
            return
        self._buffer = b""
        body, path = buffer[end + 4:], line.split(b" ", 2)[1]
        if path.startswith(b"/v1/"):
            self._generate(headers, body)
        else:
            self._transport.write(self._worker.side_channel(path, headers, body))

    def _generate(self, headers: dict[str, str], body: bytes) -> None:
        if headers.get(WORKER_TOKEN_HEADER) != self._worker.token:
            self._transport.write(response(b"{}").replace(b"200 OK", b"403 Forbidden"))
            return
        request = decode_internal(headers, body)
        tokens = request.prompts[0]
        cached, events = self._worker.pool.take(tokens)
        self._worker.publish(events)
        found = _NUMBER.search(request.json_body)
        assert found is not None, "a request without a number"
        words = answer_words(int(found[1]), is_large=bool(found[2]))
        cached_header = CACHED_TOKENS_HEADER.encode()
        if b'"stream":true' not in request.json_body:
            whole = _WHOLE % (b"".join(words), len(tokens), len(words), len(tokens) + len(words), cached)
            self._transport.write(response(whole, more=b"%b: %d\r\n" % (cached_header, cached)))
            return
        events_out = [chunk(_EVENT % word) for word in words]
        self._transport.write(_STREAM_HEAD % (cached_header, cached) + events_out[0])
        self._rest = [*events_out[1:], chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
        self._worker.num_running += 1
        self._timer = asyncio.get_running_loop().call_later(PACE_S, self._next)

    def _next(self) -> None:
        half = max(1, len(self._rest) // 2)
        self._transport.write(b"".join(self._rest[:half]))
        self._rest = self._rest[half:]
        if self._rest:
            self._timer = asyncio.get_running_loop().call_later(PACE_S, self._next)
        else:
            self._timer = None
            self._worker.num_running -= 1


async def _serve(port: int) -> None:
    worker = SoakWorker()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(worker), "127.0.0.1", port)
    await asyncio.gather(server.serve_forever(), worker.serve_replays())


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.soak_worker",
                                     description="The far end of the soak: answers and KV events without a model.")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
