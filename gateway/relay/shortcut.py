"""A stream's shortcut: chunks go from the worker's connection straight into the client's while none needs thought.

Owns: which chunks may go so, and that they are remembered as if they had gone the long way: at once, or a few of them
later, before anybody looks. Must never: take a chunk in part, or one that waits for somebody: a slow client, an event
in pieces and a worker that gives up are relay.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.relay.sse import StreamTail
from gateway.relay.transcript import Transcript

# Chunks that have gone to the client and are not remembered yet. A framed one has at most FRAMED_BYTES_MAX.
UNSETTLED_MAX = 64

# Hand bytes to the client at once; False when it has to be waited for, or has left. The second argument: the same
# bytes as one chunk of HTTP/1.1, where they came so.
SendNow = Callable[[bytes, bytes | None], bool]


class Shortcut:
    """take() is called from within the worker's connection; instants are time.monotonic()."""

    __slots__ = ("_came", "_passed", "_send", "_tail", "_transcript", "last_chunk_at", "num_chunks")

    def __init__(self, send: SendNow, tail: StreamTail, transcript: Transcript | None) -> None:
        self._send = send
        self._tail = tail
        self._transcript = transcript
        self._came: list[bytes] = []
        self._passed: list[bytes] = []
        self.num_chunks = 0
        self.last_chunk_at = 0.0

    def take(self, chunk: bytes, framed: bytes | None) -> bool:
        """Pass this chunk on, unless it needs thought. `framed`: see upstream.Take."""
        transcript = self._transcript
        if transcript is None:
            passing: bytes | None = chunk
        else:
            passing = transcript.passing_whole(chunk)
        if passing is None or (passing and not self._send(passing, framed if passing is chunk else None)):
            return False
        self._passed.append(passing)
        if transcript is not None:
            self._came.append(chunk)
        self.num_chunks += 1
        self.last_chunk_at = time.monotonic()
        if framed is None or len(self._passed) >= UNSETTLED_MAX:
            self.settle()
        return True

    def settle(self) -> None:
        """Have tail and transcript remember what has passed."""
        if self._came and self._transcript is not None:
            self._transcript.keep(b"".join(self._came))
            self._came = []
        if self._passed:
            passed, self._passed = b"".join(self._passed), []
            if passed:
                self._tail.feed(passed)
