"""A worker without a model: a real HTTP server and real event sockets that speak a headstart worker's wire formats.

It tokenises bytes, remembers the blocks of the prompts it was sent, publishes them as KV events, and misbehaves on
request. It shares the codecs of worker.protocol with the code under test, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
import zmq
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from zmq.asyncio import Context

from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_completion, parse_embedding, parse_tokenize
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, HashScheme, block_hashes
from worker.protocol.cache_events import (
    AllBlocksCleared,
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
from worker.protocol.internal_request import WORKER_TOKEN_HEADER, decode_internal, is_internal

BLOCK_SIZE = 16
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
_epochs = itertools.count(1)
_PARSERS: dict[str, Callable[[bytes], Any]] = {
    "/v1/chat/completions": parse_chat, "/v1/completions": parse_completion, "/v1/embeddings": parse_embedding}
Behaviour = Callable[["StubWorker", web.Request, "Seen"], Awaitable[web.StreamResponse]]


def byte_bundle(chat_template: str | None = CHAT_TEMPLATE) -> TokenizerBundle:
    """A tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    templates = {} if chat_template is None else {"default": chat_template}
    return TokenizerBundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens={}, chat_templates=templates,
                           eos_token_ids=(0,))


@dataclass
class Seen:
    """One request as it arrived, and what the stub made of it."""

    path: str
    headers: dict[str, str]
    body: bytes
    internal: bool
    stream: bool
    prompt: list[int]
    extra_keys: tuple[ExtraKey, ...]
    cached_tokens: int = 0
    left_early: asyncio.Event = field(default_factory=asyncio.Event)


class StubWorker:
    """start() and stop() may alternate: each start is another life with another epoch on the same HTTP port."""

    def __init__(self, *, model: str = "stub", worker_token: str = "", chat_template: str | None = CHAT_TEMPLATE,
                 exactness: str = "fast", max_context: int = 4096, bundle: TokenizerBundle | None = None) -> None:
        self.model = model
        self.worker_token = worker_token
        self.max_context = max_context
        self.bundle = bundle or byte_bundle(chat_template)
        self.renderer = PromptRenderer(self.bundle)
        self.scheme = HashScheme(block_size=BLOCK_SIZE, seed=b"stub", model=model, weights="w",
                                 tokenizer=self.bundle.tokenizer_digest, template=self.bundle.template_digest,
                                 kv_dtype="float32", exactness=exactness)
        self.next_behaviours: deque[Behaviour] = deque()
        self.seen: list[Seen] = []
        self.kv_problem: int | None = None
        self.port = 0
        self.epoch = ""
        self.publishing = self.tells_events = True
        self.ring_size = 1000
        self.blocks_total = 1000
        self.num_running = self.num_looks = 0  # requests of others; looks at GET /kv
        self.event_addresses: tuple[str, str] | None = None  # in place of its own: a proxy's
        self.num_unchanged_tokenizers = 0
        self.was_probed, self.may_be_probed = asyncio.Event(), asyncio.Event()
        self.may_be_probed.set()
        self.may_tell = asyncio.Event()
        self.may_tell.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def own_event_addresses(self) -> tuple[str, str]:
        """Of the live and the replay socket of this life."""
        return (self._pub.getsockopt_string(zmq.LAST_ENDPOINT), self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    # ---- lives ---------------------------------------------------------------------------------------------------

    async def start(self) -> StubWorker:
        self.epoch = f"life-{next(_epochs)}"
        self.blocks: dict[int, BlockStored] = {}
        self._ring: list[tuple[int, bytes]] = []
        self._next_seq = 0
        self._context = Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:*")
        self._replays = asyncio.create_task(self._serve_replays())
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/kv", self._kv)
        app.router.add_get("/kv/snapshot", self._snapshot)
        app.router.add_get("/tokenizer", self._tokenizer)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/embeddings", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        await self.publish([AllBlocksCleared()])
        return self

    async def stop(self) -> None:
        self._replays.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._replays
        self._context.destroy(linger=0)
        await self._runner.cleanup()

    # ---- events --------------------------------------------------------------------------------------------------

    async def publish(self, events: list[CacheEvent], *, lose: bool = False, times: int = 1) -> int:
        """Number a batch and send it `times` times, or `lose` it on the way (a replay still has it)."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload = encode_batch(events, ts=0.0, epoch=self.epoch)
        self._ring = [*self._ring, (seq, payload)][-self.ring_size:]
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks |= dict(zip(event.block_hashes, _one_by_one(event), strict=True))
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            else:
                for block_hash in event.block_hashes:
                    self.blocks.pop(block_hash, None)
        for _ in range(0 if lose else times):
            await self._pub.send_multipart(encode_live_message(b"", seq, payload))
        return seq

    def stored(self, token_ids: list[int], extra_keys: tuple[ExtraKey, ...] = ()) -> BlockStored:
        """The event for a prompt that starts a chain."""
        hashes = block_hashes(token_ids, self.scheme, extra_keys)
        keys = () if not extra_keys else (extra_keys, *((),) * (len(hashes) - 1))
        return BlockStored(tuple(hashes), None, tuple(token_ids[:len(hashes) * BLOCK_SIZE]), BLOCK_SIZE, keys)

    async def _serve_replays(self) -> None:
        while True:
            identity, *frames = await self._router.recv_multipart()
            start_seq = parse_replay_request(frames)
            for seq, payload in self._ring:
                if seq >= start_seq:
                    await self._router.send_multipart([identity, *encode_replay_reply(b"", seq, payload)])
            await self._router.send_multipart([identity, *encode_replay_end()])

    # ---- side channel --------------------------------------------------------------------------------------------

    async def _kv(self, request: web.Request) -> web.Response:
        self.num_looks += 1
        await self.may_tell.wait()
        if self.kv_problem is not None:
            return _error(self.kv_problem, "worker_loading", "The model is still loading.")
        num_blocks = len(self.blocks)
        is_accepted = request.headers.get(WORKER_TOKEN_HEADER) == self.worker_token
        return _json({
            "engine": "headstart", "version": "stub", "pid": None, "epoch": self.epoch, "model": self.model,
            "hash_scheme": self.scheme.to_wire(with_seed=is_accepted or not self.worker_token),
            "internal_requests": "off" if not self.worker_token else "accepted" if is_accepted else "refused",
            "hash_scheme_digest": self.scheme.digest(),
            "block_size": BLOCK_SIZE, "max_context": self.max_context, "exactness": self.scheme.exactness,
            "kv_cache": "full", "load": {"running": self.num_running},
            "events": dict(zip(("endpoint", "replay_endpoint"), self.event_addresses or self.own_event_addresses,
                               strict=True)) if self.tells_events else None,
            "blocks": {"total": self.blocks_total, "free": max(0, self.blocks_total - num_blocks),
                       "cached": num_blocks, "used": 0},
            "rates": {"prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01}, "field_of_tomorrow": 1})

    async def _snapshot(self, request: web.Request) -> web.Response:
        header = SnapshotHeader(epoch=self.epoch, barrier_seq=self._next_seq, block_size=BLOCK_SIZE,
                                num_blocks=len(self.blocks), hash_scheme_digest=self.scheme.digest())
        lines = [encode_snapshot_header(header), *map(encode_snapshot_block, self.blocks.values())]
        return web.Response(body=b"".join(lines), content_type="application/x-ndjson")

    async def _tokenizer(self, request: web.Request) -> web.Response:
        tag = f'"{self.bundle.digest}"'
        if request.headers.get("If-None-Match") == tag:
            self.num_unchanged_tokenizers += 1
            return web.Response(status=304, headers={"ETag": tag})
        return web.Response(body=self.bundle.to_wire(), headers={"ETag": tag})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.was_probed.set()
        await self.may_be_probed.wait()
        tokens = self.renderer.tokenize(parse_tokenize(await request.read()))
        return _json({"count": len(tokens), "tokens": tokens, "max_model_len": 4096})

    # ---- generation ----------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        is_chat = request.path.endswith("chat/completions")
        parse = _PARSERS[request.path]
        if internal := is_internal(request.headers):
            if request.headers.get(WORKER_TOKEN_HEADER) != self.worker_token or not self.worker_token:
                return _error(403, "forbidden", "wrong worker token")
            decoded = decode_internal(request.headers, raw)
            prompt, salt = decoded.prompts[0], decoded.salt
            extra_keys = () if salt is None else (ExtraKey(ExtraKeyKind.GATEWAY_SALT, salt, decoded.salt_from),)
            parsed: Any = parse(decoded.json_body)
        else:
            parsed = parse(raw)
            prompt = self.renderer.chat(parsed) if is_chat else self.renderer.completion(parsed)[0]
            body_salt = parsed.cache_salt
            extra_keys = () if body_salt is None else (ExtraKey(ExtraKeyKind.BODY_SALT, body_salt.encode()),)
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.path, headers, raw, internal, parsed.stream, prompt, extra_keys)
        self.seen.append(seen)
        behave = self.next_behaviours.popleft() if self.next_behaviours else answer
        try:
            return await behave(self, request, seen)
        except (asyncio.CancelledError, ConnectionError):
            seen.left_early.set()
            raise

    async def take_prompt(self, seen: Seen) -> None:
        """Count the hit, then hold and publish the prompt's blocks."""
        hashes = block_hashes(seen.prompt, self.scheme, seen.extra_keys)
        held = list(itertools.takewhile(lambda block_hash: block_hash in self.blocks, hashes))
        seen.cached_tokens = min(len(held) * BLOCK_SIZE, len(seen.prompt) - 1)
        if self.publishing and len(held) < len(hashes):
            await self.publish([self.stored(seen.prompt, seen.extra_keys)] if not held else
                               [rest_of(self.stored(seen.prompt, seen.extra_keys), len(held))])


# ---- behaviours ---------------------------------------------------------------------------------------------------

TEXT = ("Hello", " wor", "ld")


async def answer(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    """As a good worker does."""
    await stub.take_prompt(seen)
    headers = {"x-headstart-cached-tokens": str(seen.cached_tokens)}
    if seen.path.endswith("embeddings"):
        return _json({"object": "list", "model": stub.model, "usage": _usage(seen), "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0]}]})
    if not seen.stream:
        return _json({"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": {
            "role": "assistant", "content": "".join(TEXT)}}], "usage": _usage(seen)}, headers=headers)
    response = await open_stream(request, headers)
    for event in events_of(seen):
        await response.write(event)
    await response.write_eof()
    return response


async def close_before_first_byte(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError("died")


async def die_mid_stream(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await open_stream(request, {})
    await response.write(events_of(seen)[0])
    await asyncio.sleep(0)
    assert request.transport is not None
    request.transport.close()
    raise ConnectionResetError("died")


async def end_without_done(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await open_stream(request, {})
    await response.write(events_of(seen)[0])
    await response.write_eof()
    return response


async def never_answer(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def stream_one_then_hang(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await open_stream(request, {})
    await response.write(events_of(seen)[0])
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def pause(seconds: float, *, torn: bool = False) -> Behaviour:
    """Stream with one silence in the middle; `torn`: in the middle of an event."""

    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, {})
        whole = b"".join(events_of(seen))
        cut = len(events_of(seen)[0]) + (5 if torn else 0)
        await response.write(whole[:cut])
        await asyncio.sleep(seconds)
        await response.write(whole[cut:])
        await response.write_eof()
        return response

    return behave


def refuse(status: int, code: str, **headers: str) -> Behaviour:
    """An error object with this status."""

    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = _error(status, code, f"said the stub on {stub.port}")
        response.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
        return response

    return behave


def events_of(seen: Seen) -> list[bytes]:
    """The SSE events of a good answer."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in TEXT]
    chunks.append({"choices": [], "usage": _usage(seen)})
    return [*(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


async def open_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    return response


def _usage(seen: Seen) -> dict[str, Any]:
    return {"prompt_tokens": len(seen.prompt), "completion_tokens": len(TEXT),
            "prompt_tokens_details": {"cached_tokens": seen.cached_tokens}}


def _one_by_one(event: BlockStored) -> list[BlockStored]:
    parents = [event.parent_block_hash, *event.block_hashes]
    return [BlockStored((block_hash,), parents[index],
                        event.token_ids[index * BLOCK_SIZE:(index + 1) * BLOCK_SIZE], BLOCK_SIZE,
                        event.extra_keys[index:index + 1]) for index, block_hash in enumerate(event.block_hashes)]


def rest_of(event: BlockStored, num_held: int) -> BlockStored:
    """The store without its first `num_held` (at least one) blocks."""
    return msgspec.structs.replace(event, block_hashes=event.block_hashes[num_held:],
                                   parent_block_hash=event.block_hashes[num_held - 1],
                                   token_ids=event.token_ids[num_held * BLOCK_SIZE:],
                                   extra_keys=event.extra_keys[num_held:])


def _json(payload: object, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(payload), content_type="application/json", headers=headers)


def _error(status: int, code: str, message: str) -> web.Response:
    return web.Response(status=status, content_type="application/json", body=orjson.dumps(
        {"error": {"message": message, "type": "x", "param": None, "code": code}}))


@contextlib.asynccontextmanager
async def running(*stubs: StubWorker) -> AsyncIterator[None]:
    """The stubs, started and stopped."""
    for stub in stubs:
        await stub.start()
    try:
        yield
    finally:
        for stub in stubs:
            await stub.stop()
