"""Heads of requests that were understood before, so that the same bytes need not be parsed again (sans-I/O).

Owns: what a head said, by a digest of all its bytes but the digits of its Content-Length. What is known is exactly
what aiohttp's parser and strict_head.py made of those very bytes; nothing is parsed here. Must never: keep a head
itself, which holds a key, or know one with two lengths, none, or a coding of its body.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

HEADS_MAX = 2048
HEAD_MAX_BYTES = 4096
# What other writings of it there are goes the usual way.
_LENGTHS = (b"\r\nContent-Length: ", b"\r\ncontent-length: ", b"\r\nContent-length: ")
LENGTH_DIGITS_MAX = 9
_ZERO = ord("0")
_END = b"\r\n\r\n"

T = TypeVar("T")


class Cut(NamedTuple):
    """Where a request's head ends, how long its body is, and its head without that length, as it is remembered."""

    end: int
    length: int
    key: tuple[int, bytes]


class KnownHeads(Generic[T]):
    """At most HEADS_MAX, in two generations: the old one goes when the young one has half of the room."""

    def __init__(self) -> None:
        self._keyed = blake2b(key=secrets.token_bytes(32), digest_size=32)
        self._young: dict[tuple[int, bytes], T] = {}
        self._old: dict[tuple[int, bytes], T] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def cut(self, data: bytes) -> Cut | None:
        """`data` begins with a head; None for one that is not whole, too long, or of another kind."""
        end = data.find(_END)
        if not 0 <= end <= HEAD_MAX_BYTES:
            return None
        for name in _LENGTHS:
            if (at := data.find(name, 0, end)) >= 0:
                break
        start = at + len(name)
        stop = data.find(b"\r\n", start, end + 2)
        length = data[start:stop]
        if at < 0 or not length.isdigit() or length[0] == _ZERO or len(length) > LENGTH_DIGITS_MAX:
            return None
        # The place of the length belongs to the key: bytes around another place are another head.
        digest = self._keyed.copy()
        digest.update(data[:start] + data[stop:end])
        return Cut(end + len(_END), int(length), (start, digest.digest()))

    def get(self, cut: Cut) -> T | None:
        """What this head says, if it is known."""
        said = self._young.get(cut.key)
        if said is None and (said := self._old.get(cut.key)) is not None:
            self.put(cut, said)
        return said

    def put(self, cut: Cut, said: T) -> None:
        """Remember it."""
        if len(self._young) >= HEADS_MAX // 2:
            self._old, self._young = self._young, {}
        self._young[cut.key] = said

    def forget(self) -> None:
        """All of them: keys have changed."""
        self._young, self._old = {}, {}
