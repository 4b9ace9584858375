"""Ids of stretches of text, whatever stood before them: a bounded memory of (scope, text).

Owns the memory and its bound. It knows nothing of tokenizers: whoever stores ids vouches that they are the text's
wherever it occurs. Texts are compared, never only hashed.

Two generations: what is asked for moves to the young one; when the young one has half of the room, it becomes the old
one and the old one is forgotten. So a use costs one look-up and no list is kept in order. Approximation: something
last used just before a change of generations lives half as long as something used just after it.
"""

from __future__ import annotations

import sys
from array import array
from threading import Lock

ENTRY_BYTES = 300   # of an entry beside its text and ids, as tracemalloc sees them

Key = tuple[str, str]       # scope, text


class SegmentMemory:
    """At most `max_bytes`. Safe to use from several threads; the counters of finds may then miss a few."""

    __slots__ = ("_lock", "_old", "_old_bytes", "_young", "_young_bytes", "max_bytes", "num_found", "num_missed")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_found = 0
        self.num_missed = 0
        self._young: dict[Key, array[int]] = {}
        self._old: dict[Key, array[int]] = {}
        self._young_bytes = self._old_bytes = 0
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    @property
    def num_bytes(self) -> int:
        """What both generations are charged; what is in both counts twice."""
        return self._young_bytes + self._old_bytes

    def get(self, key: Key) -> array[int] | None:
        """The ids stored for it, not to be changed; it counts as used."""
        token_ids = self._young.get(key)
        if token_ids is None:
            token_ids = self._old.get(key)
            if token_ids is None:
                self.num_missed += 1
                return None
            self.put(key, token_ids)
        self.num_found += 1
        return token_ids

    def put(self, key: Key, token_ids: array[int]) -> None:
        """Remember ids. What alone is larger than half of the room is not remembered."""
        num_bytes = _charge(key, token_ids)
        with self._lock:
            if num_bytes > self.max_bytes // 2 or key in self._young:
                return
            if self._young_bytes + num_bytes > self.max_bytes // 2:
                self._old, self._old_bytes = self._young, self._young_bytes
                self._young, self._young_bytes = {}, 0
            self._young[key] = token_ids
            self._young_bytes += num_bytes

    def discard(self, key: Key) -> None:
        """Forget one."""
        with self._lock:
            if (token_ids := self._young.pop(key, None)) is not None:
                self._young_bytes -= _charge(key, token_ids)
            if (token_ids := self._old.pop(key, None)) is not None:
                self._old_bytes -= _charge(key, token_ids)

    def clear(self) -> None:
        """Forget everything, counters included."""
        with self._lock:
            self._young, self._old = {}, {}
            self._young_bytes = self._old_bytes = self.num_found = self.num_missed = 0

    def check_invariants(self) -> None:
        """AssertionError when the charge is off or the bound broken."""
        for generation, charged in ((self._young, self._young_bytes), (self._old, self._old_bytes)):
            assert charged == sum(_charge(key, token_ids) for key, token_ids in generation.items())
            assert charged <= self.max_bytes // 2


def _charge(key: Key, token_ids: array[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(key[1]) + len(token_ids) * token_ids.itemsize
