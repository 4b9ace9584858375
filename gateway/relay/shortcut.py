"""A stream's shortcut: chunks go from the worker's connection straight into the client's while none needs thought.

Owns: which chunks may go so, and that they are remembered as if they had gone the long way: at once, or a few of them
later, before anybody looks. Must never: take a chunk in part, or one that waits for somebody: a slow client, an event
in pieces and a worker that gives up are relay.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from gateway.relay.response_parser import CHUNK_SIZES
from gateway.relay.sse import StreamTail
from gateway.relay.transcript import Transcript
from gateway.relay.upstream import Takers

# Chunks that have gone to the client and are not remembered yet, each of FRAMED_BYTES_MAX at most.
UNSETTLED_MAX = 64

# Hand bytes to the client at once; False when it has to be waited for, or has left. The second argument: the same
# bytes as one chunk of HTTP/1.1, where they came so.
SendNow = Callable[[bytes, bytes | None], bool]


class Shortcut:
    """`takers` are called from within the worker's connection; instants are time.monotonic()."""

    __slots__ = ("_came", "_passed", "_send", "_tail", "_transcript", "last_chunk_at", "num_chunks")

    def __init__(self, send: SendNow, tail: StreamTail, transcript: Transcript | None,
                 last_chunk_at: float = 0.0) -> None:
        self._send = send
        self._tail = tail
        self._transcript = transcript
        self._came: list[bytes] = []
        self._passed: list[bytes] = []
        self.num_chunks = 0
        self.last_chunk_at = last_chunk_at

    @property
    def takers(self) -> Takers:
        """See UpstreamResponse."""
        return Takers(self.take, self.take_framed)

    def send_through(self, send: SendNow) -> None:
        """From now on."""
        self._send = send

    def take(self, chunk: bytes) -> bool:
        """Pass this chunk on, unless it needs thought."""
        transcript = self._transcript
        passing = chunk if transcript is None else transcript.passing_whole(chunk)
        if passing is None or (passing and not self._send(passing, None)):
            return False
        self._passed.append(passing)
        if transcript is not None:
            self._came.append(chunk)
        self.num_chunks += 1
        self.last_chunk_at = monotonic()
        self.settle()
        return True

    def take_framed(self, data: bytes) -> bool:
        """take() of a chunk with its framing; False for what is none. Most of a stream comes so, chunk by chunk,
        and finds the processor's caches cold: what is called here costs more than it does."""
        end = data.find(b"\r\n")
        if CHUNK_SIZES.get(data[:end]) != len(data) - end - 4 or not data.endswith(b"\r\n"):
            return False
        chunk, transcript = data[end + 2:-2], self._transcript
        passing = chunk if transcript is None else transcript.passing_whole(chunk)
        if passing is None or (passing and not self._send(passing, data if passing is chunk else None)):
            return False
        passed = self._passed
        passed.append(passing)
        if transcript is not None:
            self._came.append(chunk)
        self.num_chunks += 1
        self.last_chunk_at = monotonic()
        if len(passed) >= UNSETTLED_MAX:
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


class SoFar(NamedTuple):
    """A stream whose first bytes have gone to its client, and what has followed them on the shortcut."""

    shortcut: Shortcut
    tail: StreamTail
    transcript: Transcript | None
    first_chunk_at: float

    @property
    def num_chunks(self) -> int:
        """Of the worker's."""
        return 1 + self.shortcut.num_chunks
