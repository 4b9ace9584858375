"""From the first byte on: chunks pass to the client as they came, in order.

Owns: the pace of one response (keep-alive comments, the longest silence allowed, back-pressure) and how it ended.
Must never: parse or edit a chunk; the one addition is a comment or an error event, and only where an event ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway import errors
from gateway.relay.retry import FirstAnswer
from gateway.relay.sse import KEEPALIVE_COMMENT, StreamTail, error_event
from gateway.relay.upstream import FailureKind, UpstreamFailure
from worker.protocol.api_error import ApiError

# Bodies up to this size are complete before the client sees their first byte; larger ones pass as they come.
MAX_WHOLE_BODY_BYTES = 8 * 1024 * 1024

Write = Callable[[bytes], Awaitable[None]]
RenderError = Callable[[ApiError], bytes]


class ClientLeft(Exception):
    """The client closed its connection, or stopped reading for longer than the gap limit."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """`keepalive_s` of silence brings a comment; `chunk_gap_s` of silence from either side ends the stream."""

    keepalive_s: float
    chunk_gap_s: float


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a relayed stream ended. `failure` is None for one that said [DONE]; instants are time.monotonic()."""

    failure: ApiError | None
    tail: StreamTail
    num_chunks: int
    first_chunk_at: float
    last_chunk_at: float


def _never() -> bool:
    return False


async def relay_stream(answer: FirstAnswer, write: Write, render_error: RenderError, limits: RelayLimits, *,
                       is_stopping: Callable[[], bool] = _never) -> StreamEnd:
    """Pass an SSE response on to its end; one that ends without [DONE] gets an SSE error event. Closes `answer`.

    A cancellation while `is_stopping` is such an end, by the gateway itself, and goes no further.
    """
    tail = StreamTail()
    failure: ApiError | None = None
    chunk, num_chunks = answer.first_chunk, 0
    first_chunk_at = last_chunk_at = time.monotonic()
    try:
        while chunk:
            tail.feed(chunk)
            num_chunks += 1
            await _write(write, chunk, limits)
            chunk = await _next_chunk(answer, tail, write, limits)
            last_chunk_at = time.monotonic() if chunk else last_chunk_at
    except UpstreamFailure as lost:
        failure = _mid_stream_error(lost)
    except asyncio.CancelledError:
        if not is_stopping():
            raise
        _uncancel()
        failure = errors.gateway_stopping()
    finally:
        answer.response.close()
    if tail.ended_with_done():
        failure = None  # everything was said; how the connection ended after that is nobody's concern
    else:
        failure = failure or errors.worker_failed("The worker ended the stream without [DONE].")
        await _write(write, error_event(render_error(failure)), limits)
    return StreamEnd(failure, tail, num_chunks, first_chunk_at, last_chunk_at)


async def read_whole(answer: FirstAnswer, limits: RelayLimits) -> tuple[bytes, bool]:
    """The body up to MAX_WHOLE_BODY_BYTES, and whether that is all of it. Does not close `answer`.

    Raises ApiError 502 or 504 when the worker goes away or falls silent: the client has seen nothing yet.
    """
    body = bytearray(answer.first_chunk)
    try:
        while len(body) <= MAX_WHOLE_BODY_BYTES:
            async with asyncio.timeout(limits.chunk_gap_s):
                chunk = await answer.response.read_chunk()
            if not chunk:
                return bytes(body), True
            body += chunk
    except TimeoutError as silent:
        raise _mid_stream_error(UpstreamFailure(FailureKind.TIMEOUT, "silent")) from silent
    except UpstreamFailure as lost:
        raise _mid_stream_error(lost) from lost
    return bytes(body), False


async def relay_rest(answer: FirstAnswer, write: Write, limits: RelayLimits) -> None:
    """Pass on what read_whole left of a large body. UpstreamFailure: the client's response must be cut off."""
    chunk = b""
    while True:
        try:
            async with asyncio.timeout(limits.chunk_gap_s):
                chunk = await answer.response.read_chunk()
        except TimeoutError as silent:
            raise UpstreamFailure(FailureKind.TIMEOUT, "silent") from silent
        if not chunk:
            return
        await _write(write, chunk, limits)


async def _next_chunk(answer: FirstAnswer, tail: StreamTail, write: Write, limits: RelayLimits) -> bytes:
    silent_s = 0.0
    while True:
        wait_s = min(limits.keepalive_s, limits.chunk_gap_s - silent_s)
        try:
            async with asyncio.timeout(wait_s):
                return await answer.response.read_chunk()
        except TimeoutError:
            silent_s += wait_s
        if silent_s >= limits.chunk_gap_s:
            raise UpstreamFailure(FailureKind.TIMEOUT, f"silent for {silent_s:g} s")
        if tail.at_event_border:
            await _write(write, KEEPALIVE_COMMENT, limits)


async def _write(write: Write, data: bytes, limits: RelayLimits) -> None:
    try:
        async with asyncio.timeout(limits.chunk_gap_s):
            await write(data)
    except TimeoutError as stalled:
        raise ClientLeft(f"read nothing for {limits.chunk_gap_s:g} s") from stalled
    except ConnectionError as gone:
        raise ClientLeft("closed the connection") from gone


def _uncancel() -> None:
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def _mid_stream_error(lost: UpstreamFailure) -> ApiError:
    if lost.kind is FailureKind.TIMEOUT:
        return errors.worker_timeout("The worker fell silent in the middle of its answer.")
    return errors.worker_failed("The worker went away in the middle of its answer.")
