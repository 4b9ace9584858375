"""A stream's shortcut: chunks go from the worker's connection straight into the client's while none needs thought.

Owns: which chunks may go so, and that they are remembered as if they had gone the long way. Must never: take a chunk
in part, or one that waits for somebody: a slow client, an event in pieces and a worker that gives up are relay.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.relay.sse import StreamTail
from gateway.relay.transcript import Transcript

# Hand bytes to the client at once; False when it has to be waited for, or has left.
SendNow = Callable[[bytes], bool]


class Shortcut:
    """take() is called from within the worker's connection; instants are time.monotonic()."""

    __slots__ = ("_send", "_tail", "_transcript", "last_chunk_at", "num_chunks")

    def __init__(self, send: SendNow, tail: StreamTail, transcript: Transcript | None) -> None:
        self._send = send
        self._tail = tail
        self._transcript = transcript
        self.num_chunks = 0
        self.last_chunk_at = 0.0

    def take(self, chunk: bytes) -> bool:
        """Pass this chunk on, unless it needs thought."""
        transcript = self._transcript
        passing = chunk if transcript is None else transcript.passing_whole(chunk)
        if passing is None or (passing and not self._send(passing)):
            return False
        if transcript is not None:
            transcript.keep(chunk)
        if passing:
            self._tail.feed(passing)
        self.num_chunks += 1
        self.last_chunk_at = time.monotonic()
        return True
