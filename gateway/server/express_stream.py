"""A stream in the express lane: from its first events to [DONE], as long as nothing on its way needs thought.

Owns: what is remembered of it for the usual way, which goes on with it where something does. Must never: wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.relay.connection import Exchange
from gateway.relay.relay import StreamEnd
from gateway.relay.retry import is_coded
from gateway.relay.shortcut import Shortcut, SoFar
from gateway.relay.sse import StreamTail, is_event_stream
from gateway.relay.transcript import Transcript
from gateway.server.raw_response import ChunkSender
from worker.protocol.api_error import ApiError
from worker.protocol.internal_request import TOKEN_IDS_HEADER

# A stream that is silent for so long is for a task to watch: comments, limits, a worker that is lost.
SILENT_MAX_S = 1.0

# Send the head and the first bytes of a stream; None: nothing was sent, this client is not for the express lane.
Begin = Callable[[bytes], ChunkSender | None]


class LaneStream:
    """One stream, once its first events have gone to the client."""

    __slots__ = ("sender", "so_far")

    def __init__(self, sender: ChunkSender, so_far: SoFar) -> None:
        self.sender = sender
        self.so_far = so_far

    def is_silent(self, now: float) -> bool:
        """Whether it is time for somebody to wait for it."""
        return now - self.so_far.shortcut.last_chunk_at > SILENT_MAX_S

    def is_done(self, exchange: Exchange) -> bool:
        """Whether it has ended, and well."""
        self.so_far.shortcut.settle()
        return exchange.is_over and self.so_far.tail.ended_with_done()

    def end(self, failure: ApiError | None) -> StreamEnd:
        """How it ended."""
        shortcut, so_far = self.so_far.shortcut, self.so_far
        shortcut.settle()
        return StreamEnd(failure, so_far.tail, so_far.num_chunks, so_far.first_chunk_at, shortcut.last_chunk_at)


def begin_stream(exchange: Exchange, begin: Begin) -> LaneStream | None:
    """A stream whose first events have come whole, on its way to the client; None: nothing was sent."""
    chunk, headers = exchange.stream_began(), exchange.headers
    if chunk is None or exchange.status != 200 or is_coded(headers):
        return None
    if not is_event_stream(headers.get("content-type", "")):
        return None
    transcript, tail, now = Transcript() if TOKEN_IDS_HEADER in headers else None, StreamTail(), time.monotonic()
    passing = chunk if transcript is None else transcript.passing_whole(chunk)
    sender = begin(passing) if passing else None
    if sender is None or not passing:
        return None
    tail.feed(passing)
    if transcript is not None:
        transcript.keep(chunk)
    so_far = SoFar(Shortcut(sender.send_now, tail, transcript, now), tail, transcript, now)
    exchange.pass_on(so_far.shortcut.takers)
    return LaneStream(sender, so_far)
