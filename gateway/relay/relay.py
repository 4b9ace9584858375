"""From the first byte on: chunks pass to the client as they came, in order.

Owns: the pace of one response (keep-alive comments, the longest silence allowed, back-pressure) and how it ended.
Must never: parse or edit a chunk; the one addition is a comment or an error event, and only where an event ends, and
what a transcript keeps from the client are comments that the gateway asked for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway import errors
from gateway.relay.retry import AttemptFailed, FirstAnswer
from gateway.relay.shortcut import SendNow, Shortcut, SoFar
from gateway.relay.sse import KEEPALIVE_COMMENT, StreamTail, error_event
from gateway.relay.transcript import Transcript
from gateway.relay.upstream import FailureKind, UpstreamFailure
from worker.protocol.api_error import ApiError

# Bodies up to this size are complete before the client sees their first byte; larger ones pass as they come.
MAX_WHOLE_BODY_BYTES = 8 * 1024 * 1024
# A silent stream looks this often whether its worker is known to be lost.
LOST_LOOK_S = 1.0
# So long a worker may take over HTTP's own end once all has been said.
DONE_LINGER_S = 1.0

# Something to await only when the client cannot take more for now; ConnectionError when it has left.
Write = Callable[[bytes], Awaitable[None] | None]
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
    """How a relayed stream ended. `failure` is None for one that said [DONE]; instants are time.monotonic().

    `can_move`: it was the worker that failed, so that another one may go on.
    """

    failure: ApiError | None
    tail: StreamTail
    num_chunks: int
    first_chunk_at: float
    last_chunk_at: float
    can_move: bool = False


class OverTime(Exception):
    """The whole request has taken longer than it may."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What is asked now and then of an answer under way: is the gateway stopping, is the worker known to be lost, is
    the time over (`ends_at`, of time.monotonic())?"""

    is_stopping: Callable[[], bool] = lambda: False
    is_lost: Callable[[], bool] = lambda: False
    ends_at: float = math.inf

    def look(self, *, is_silent: bool = True) -> None:
        """Raises OverTime, or UpstreamFailure for a lost worker that is silent."""
        if self.left_s <= 0:
            raise OverTime
        if is_silent and self.is_lost():
            raise UpstreamFailure(FailureKind.RESET, "silent, and known to be lost")

    @property
    def left_s(self) -> float:
        """Seconds until the time is over."""
        return self.ends_at - time.monotonic()


async def pass_stream(answer: FirstAnswer, write: Write, limits: RelayLimits, watch: Watch, *,
                      transcript: Transcript | None = None, send_now: SendNow | None = None,
                      so_far: SoFar | None = None) -> StreamEnd:
    """Pass an SSE response on until it ends, well or not: the end is for end_stream() to tell. Closes `answer`.

    With a transcript only whole events pass. With `send_now`, which does what `write` does, most chunks take the
    shortcut. `so_far`: it has begun already, and `answer` has no first chunk. A cancellation while the gateway is
    stopping is such an end, and goes no further.
    """
    tail = StreamTail() if so_far is None else so_far.tail
    shortcut = None if send_now is None else Shortcut(send_now, tail, transcript)
    failure: ApiError | None = None
    num_chunks, can_move = 0, False
    first_chunk_at = last_chunk_at = time.monotonic()
    if so_far is not None:
        shortcut, num_chunks, first_chunk_at = so_far.shortcut, 1, so_far.first_chunk_at
        last_chunk_at = shortcut.last_chunk_at
    settle = _nothing if shortcut is None else shortcut.settle
    comment = _comment_at(tail, settle, write, limits)

    def all_is_said() -> bool:
        settle()
        return tail.ended_with_done()

    try:
        chunk = answer.first_chunk or await next_chunk(answer, limits, watch, comment, shortcut=shortcut,
                                                       silent_s=time.monotonic() - last_chunk_at,
                                                       all_is_said=all_is_said)
        settle()
        while chunk:
            num_chunks += 1
            if transcript is not None:
                chunk = transcript.feed(chunk)
            if chunk:
                tail.feed(chunk)
                await relay_bytes(chunk, write, limits)
            if transcript is not None and transcript.lost:
                raise UpstreamFailure(FailureKind.RESET, "the worker said that it cannot go on")
            chunk = await next_chunk(answer, limits, watch, comment, shortcut=shortcut, all_is_said=all_is_said)
            settle()
            last_chunk_at = time.monotonic() if chunk else last_chunk_at
            if last_chunk_at >= watch.ends_at:
                raise OverTime
    except UpstreamFailure as lost:
        failure, can_move = mid_stream_error(lost), True
    except OverTime:
        failure = over_time()
    except asyncio.CancelledError:
        if not watch.is_stopping():
            raise
        uncancel()
        failure = errors.gateway_stopping()
    finally:
        answer.response.close()
        settle()
    if tail.ended_with_done():
        failure, can_move = None, False  # all was said; how the connection ended after that is nobody's concern
    elif failure is None:
        failure, can_move = errors.worker_failed("The worker ended the stream without [DONE]."), True
    if shortcut is not None:
        num_chunks += shortcut.num_chunks
        last_chunk_at = max(last_chunk_at, shortcut.last_chunk_at)
    return StreamEnd(failure, tail, num_chunks, first_chunk_at, last_chunk_at, can_move=can_move)


async def end_stream(end: StreamEnd, write: Write, render_error: RenderError, limits: RelayLimits) -> None:
    """A stream that ends without [DONE] gets an SSE error event."""
    if end.failure is not None:
        await relay_bytes(error_event(render_error(end.failure)), write, limits)


async def read_whole(answer: FirstAnswer, limits: RelayLimits, watch: Watch) -> tuple[bytes, bool]:
    """The body up to MAX_WHOLE_BODY_BYTES, and whether that is all of it. Does not close `answer`.

    Raises AttemptFailed when the worker goes away or falls silent: the client has seen nothing yet.
    """
    body = bytearray(answer.first_chunk)
    try:
        while len(body) <= MAX_WHOLE_BODY_BYTES:
            chunk = await answer.response.read_chunk(min(limits.chunk_gap_s, watch.left_s))
            if not chunk:
                return bytes(body), True
            body += chunk
    except (TimeoutError, UpstreamFailure) as lost:
        kind = lost.kind if isinstance(lost, UpstreamFailure) else FailureKind.TIMEOUT
        raise AttemptFailed(kind.value, mid_stream_error(UpstreamFailure(kind, "broke off")),
                            same_worker=kind is FailureKind.RESET) from lost
    return bytes(body), False


async def relay_rest(answer: FirstAnswer, write: Write, limits: RelayLimits, watch: Watch) -> None:
    """Pass on what read_whole left of a large body. UpstreamFailure: the client's response must be cut off."""
    chunk = b""
    while True:
        try:
            chunk = await answer.response.read_chunk(min(limits.chunk_gap_s, watch.left_s))
        except TimeoutError as silent:
            raise UpstreamFailure(FailureKind.TIMEOUT, "silent") from silent
        if not chunk:
            return
        await relay_bytes(chunk, write, limits)


async def next_chunk(answer: FirstAnswer, limits: RelayLimits, watch: Watch,
                     comment: Callable[[], Awaitable[None]] | None = None, *,
                     shortcut: Shortcut | None = None, silent_s: float = 0.0,
                     all_is_said: Callable[[], bool] = lambda: False) -> bytes:
    """What the worker sends next that does not take the shortcut, b"" at its end, or once it is silent and
    `all_is_said`. UpstreamFailure when it goes, is lost or silent for too long, OverTime; until then a comment goes
    to the client after every `keepalive_s` of silence, of which `silent_s` have passed. Chunks on the shortcut move
    no timer: now and then it is looked when the last one came."""
    comment_s = limits.keepalive_s
    num_passed, takers = 0, None
    if shortcut is not None:
        num_passed, takers = shortcut.num_chunks, shortcut.takers
    while True:
        wait_s = max(0.0, min(LOST_LOOK_S, comment_s - silent_s, limits.chunk_gap_s - silent_s))
        try:
            return await answer.response.read_chunk(wait_s, takers)
        except TimeoutError:
            silent_s += wait_s
        if shortcut is not None and shortcut.num_chunks != num_passed:
            num_passed, comment_s = shortcut.num_chunks, limits.keepalive_s
            silent_s = time.monotonic() - shortcut.last_chunk_at
        if silent_s >= DONE_LINGER_S and all_is_said():
            return b""
        if silent_s >= limits.chunk_gap_s:
            raise UpstreamFailure(FailureKind.TIMEOUT, f"silent for {silent_s:g} s")
        watch.look(is_silent=silent_s >= min(LOST_LOOK_S, wait_s))
        if silent_s >= comment_s:
            comment_s = silent_s + limits.keepalive_s
            if comment is not None:
                await comment()


def _nothing() -> None:
    """What there is to settle without a shortcut."""


def _comment_at(tail: StreamTail, settle: Callable[[], None], write: Write,
                limits: RelayLimits) -> Callable[[], Awaitable[None]]:
    async def comment() -> None:
        settle()
        if tail.at_event_border:
            await relay_bytes(KEEPALIVE_COMMENT, write, limits)

    return comment


async def relay_bytes(data: bytes, write: Write, limits: RelayLimits) -> None:
    """Write, and wait for a slow client, but not for ever: ClientLeft."""
    try:
        is_taken = write(data)
        if is_taken is not None:
            async with asyncio.timeout(limits.chunk_gap_s):
                await is_taken
    except TimeoutError as stalled:
        raise ClientLeft(f"read nothing for {limits.chunk_gap_s:g} s") from stalled
    except ConnectionError as gone:
        raise ClientLeft("closed the connection") from gone


def uncancel() -> None:
    """The cancellation of this task has been answered."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def over_time() -> ApiError:
    """The request has had all the time there is for one."""
    return errors.worker_timeout("The whole answer took longer than total_timeout_s allows.")


def mid_stream_error(lost: UpstreamFailure) -> ApiError:
    """What the client is told when nobody goes on."""
    if lost.kind is FailureKind.TIMEOUT:
        return errors.worker_timeout("The worker fell silent in the middle of its answer.")
    return errors.worker_failed("The worker went away in the middle of its answer.")
