"""How a headstart worker tells about itself: GET /kv, /tokenizer, /kv/snapshot and POST /tokenize.

Owns: the requests and the reading of their answers. Must never: keep state about a worker, or retry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson

from gateway.knowledge.discovery.static import DiscoveredWorker
from gateway.relay.upstream import Upstream, UpstreamFailure, UpstreamRequest, UpstreamResponse
from worker.prompt.requests import TokenizeRequest
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.cache_events import BlockStored, CacheEventError, SnapshotHeader, SnapshotReader

REQUEST_TIMEOUT_S = 5.0
SNAPSHOT_TIMEOUT_S = 60.0
PREWARM_TIMEOUT_S = 120.0
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
NOT_MODIFIED = 304


class WorkerUnreachable(Exception):
    """Nobody answers. The message names the address."""


class WorkerLate(WorkerUnreachable):
    """No answer within the time limit: gone, or merely busy."""


class WorkerNotReady(Exception):
    """It answers, and says that it is not ready (loading, draining). The message is its own."""


class WorkerNotUnderstood(Exception):
    """Something answers that is not a headstart worker of a version that we can read."""


class EventSockets(msgspec.Struct, frozen=True):
    """Where KV events and their replay are. Addresses as the worker bound them."""

    endpoint: str
    replay_endpoint: str
    topic: str = ""


class BlockCounts(msgspec.Struct, frozen=True):
    total: int = 0
    free: int = 0
    cached: int = 0
    used: int = 0


class LoadReport(msgspec.Struct, frozen=True):
    """Sequences and tokens of work in the worker right now."""

    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    running_prefill_tokens: int = 0
    decode_context_tokens: int = 0


class Rates(msgspec.Struct, frozen=True):
    """Measured speeds; 0 while unknown."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


class Scheduling(msgspec.Struct, frozen=True):
    """How it plans its steps. `token_budget`: positions of prompts that one step computes beside decoding; 0 while
    unknown."""

    token_budget: int = 0


class Cpu(msgspec.Struct, frozen=True):
    """Where its engine computes: workers with one id share these cores."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    cores: Annotated[int, msgspec.Meta(ge=1)]
    threads: Annotated[int, msgspec.Meta(ge=1)]


AdapterDigest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Prewarmed(msgspec.Struct, frozen=True):
    """What POST /kv/prewarm found already cached."""

    cached_tokens: int


class WorkerReport(msgspec.Struct, frozen=True):
    """GET /kv. Unknown fields are ignored, so that a newer worker can be read. `adapters`: content digests by name.

    `internal_requests`: accepted, refused or off (it has no token); "" from a worker that does not say.
    """

    engine: str
    epoch: str
    model: str
    hash_scheme: dict[str, Any]
    hash_scheme_digest: str
    block_size: int
    max_context: int
    events: EventSockets | None = None
    adapters: dict[str, AdapterDigest] = {}
    version: str = ""
    pid: int | None = None
    exactness: str = ""
    kv_cache: str = "full"
    kv_dtype: str = ""
    draining: bool = False
    internal_requests: str = ""
    blocks: BlockCounts = BlockCounts()
    load: LoadReport = LoadReport()
    rates: Rates = Rates()
    scheduling: Scheduling = Scheduling()
    cpu: Cpu | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cache before batch `header.barrier_seq`; that one and later ones apply on top."""

    header: SnapshotHeader
    blocks: list[BlockStored]


_report_decoder = msgspec.json.Decoder(WorkerReport)


class HeadstartWorker:
    """One worker's side channel. The way there is shared and owned by the caller."""

    def __init__(self, upstream: Upstream, worker: DiscoveredWorker, worker_token: str) -> None:
        self._upstream = upstream
        self.worker = worker
        self._headers = {"x-headstart-worker-token": worker_token} if worker_token else {}
        if worker.api_key:
            self._headers["Authorization"] = f"Bearer {worker.api_key}"

    async def report(self, timeout_s: float = REQUEST_TIMEOUT_S) -> WorkerReport:
        """GET /kv."""
        async with self._request("GET", "/kv", timeout_s=timeout_s) as response:
            body = await _bounded_body(response, MAX_ANSWER_BYTES)
        try:
            return _report_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise WorkerNotUnderstood(f"{self.worker.url}/kv: {error}; is this a headstart worker?") from error

    async def tokenizer(self, known: TokenizerBundle | None = None) -> TokenizerBundle:
        """GET /tokenizer; `known` itself when the worker has the same, which is then not sent and parsed again."""
        tags = {} if known is None else {"If-None-Match": f'"{known.digest}"'}
        async with self._request("GET", "/tokenizer", timeout_s=SNAPSHOT_TIMEOUT_S, headers=tags) as response:
            if response.status == NOT_MODIFIED and known is not None:
                return known
            body = await _bounded_body(response, MAX_TOKENIZER_BYTES)
        try:
            return await asyncio.to_thread(TokenizerBundle.from_wire, body)
        except ValueError as error:
            raise WorkerNotUnderstood(f"{self.worker.url}/tokenizer: {error}") from error

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """POST /tokenize: how the worker itself renders and tokenises."""
        payload = orjson.dumps({
            "model": request.model, "prompt": request.prompt, "messages": request.messages,
            "add_special_tokens": request.add_special_tokens, "add_generation_prompt": request.add_generation_prompt})
        async with self._request("POST", "/tokenize", body=payload) as response:
            body = await _bounded_body(response, MAX_ANSWER_BYTES)
        try:
            return [int(token) for token in orjson.loads(body)["tokens"]]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise WorkerNotUnderstood(f"{self.worker.url}/tokenize: the answer has no token list") from error

    async def prewarm(self, token_ids: list[int], salt: bytes | None, salt_from: int) -> Prewarmed:
        """POST /kv/prewarm; returns when the blocks are there."""
        payload = orjson.dumps({"token_ids": token_ids, "salt": None if salt is None else salt.hex(),
                                "salt_from": salt_from})
        async with self._request("POST", "/kv/prewarm", body=payload, timeout_s=PREWARM_TIMEOUT_S) as response:
            body = await _bounded_body(response, MAX_ANSWER_BYTES)
        try:
            return msgspec.json.decode(body, type=Prewarmed)
        except msgspec.MsgspecError as error:
            raise WorkerNotUnderstood(f"{self.worker.url}/kv/prewarm: {error}") from error

    async def snapshot(self) -> Snapshot:
        """GET /kv/snapshot: what the worker's cache holds, parents before children."""
        reader = SnapshotReader()
        blocks: list[BlockStored] = []
        try:
            async with self._request("GET", "/kv/snapshot", timeout_s=SNAPSHOT_TIMEOUT_S) as response:
                async for data in _pieces(response):
                    blocks += reader.feed(data)
            reader.close()
        except CacheEventError as error:
            raise WorkerNotUnderstood(f"{self.worker.url}/kv/snapshot: {error}") from error
        assert reader.header is not None, "a snapshot that closed well has a header"
        return Snapshot(reader.header, blocks)

    @asynccontextmanager
    async def _request(self, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None,
                       timeout_s: float = REQUEST_TIMEOUT_S) -> AsyncIterator[UpstreamResponse]:
        url = f"{self.worker.url}{path}"
        headers = {**self._headers, **(headers or {}), **({"content-type": "application/json"} if body else {})}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._upstream.open(
                    UpstreamRequest(url, headers, body, self.worker.ssl_context, method))
                with contextlib.closing(response):
                    if response.status == 503:
                        raise WorkerNotReady(_message_of(await _bounded_body(response, MAX_ANSWER_BYTES)))
                    if response.status not in (200, NOT_MODIFIED):
                        raise WorkerNotUnderstood(f"{url} answered {response.status}; is this a headstart worker?")
                    yield response
        except TimeoutError as late:
            raise WorkerLate(f"{url} did not answer within {timeout_s:g} s") from late
        except UpstreamFailure as lost:
            if isinstance(lost.__cause__, TimeoutError):
                raise WorkerLate(f"{url} did not answer: {lost.detail}") from lost
            raise WorkerUnreachable(f"{url} cannot be reached ({_cause(lost)}): start the worker, or correct "
                                    "--worker; the gateway keeps trying") from lost


async def _pieces(response: UpstreamResponse) -> AsyncIterator[bytes]:
    while piece := await response.read_chunk():
        yield piece


async def _bounded_body(response: UpstreamResponse, limit_bytes: int) -> bytes:
    """To its end, so that its connection serves again."""
    body = bytearray()
    async for piece in _pieces(response):
        body += piece
        if len(body) > limit_bytes:
            raise WorkerNotUnderstood(f"an answer of more than {limit_bytes} bytes")
    return bytes(body)


def _cause(lost: UpstreamFailure) -> str:
    """The system's own word for it, where there is one."""
    inner = lost.__cause__
    return (inner.strerror if isinstance(inner, OSError) else None) or lost.detail


def _message_of(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "not ready"
