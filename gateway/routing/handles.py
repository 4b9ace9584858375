"""Handles: what an engine calls a block, and what we call it.

Owns one endpoint's map from engine hash to own hash, with a count of how often the engine stored it. In flat arrays:
24 bytes a handle, and gone at once when the endpoint is.
"""

from __future__ import annotations

from array import array

from gateway.routing.hash_table import HashTable

# Key 8, own hash 8, following 4, bucket 4, and what arrays are ahead of their use.
HANDLE_BYTES = 27
MORE_BYTES = 120
_ROWS_AT_ONCE_MIN, _ROWS_AT_ONCE_MAX = 16, 1 << 13


class Handles:
    """Each handle has one reference, and perhaps more."""

    def __init__(self) -> None:
        self._table = HashTable()
        self._own = array("Q", [0])
        self._free = array("I")
        self._more: dict[int, int] = {}  # engine hash -> references beyond the first

    def __len__(self) -> int:
        return self._table.num_entries

    def get(self, engine_hash: int) -> int | None:
        """Our own hash of the block that the engine calls so."""
        entry = self._table.find(engine_hash)
        return self._own[entry] if entry else None

    def put(self, engine_hash: int, own_hash: int) -> None:
        """The engine calls this block so; what it called so before is forgotten, its references are not."""
        entry = self._table.find(engine_hash)
        if not entry:
            if not self._free:
                self._grow()
            entry = self._free.pop()
            self._table.insert(engine_hash, entry)
        self._own[entry] = own_hash

    def add_reference(self, engine_hash: int) -> None:
        """The engine stored it once more."""
        self._more[engine_hash] = self._more.get(engine_hash, 0) + 1

    def drop_reference(self, engine_hash: int) -> None:
        """One reference less; the last takes the handle with it."""
        more = self._more.pop(engine_hash, 0)
        if more > 1:
            self._more[engine_hash] = more - 1
        elif not more:
            entry = self._table.find(engine_hash)
            self._table.delete(entry)
            self._free.append(entry)

    def memory_bytes(self) -> int:
        """An estimate from the counts."""
        return HANDLE_BYTES * len(self) + MORE_BYTES * len(self._more)

    def _grow(self) -> None:
        start = len(self._own)
        count = min(max(start // 8, _ROWS_AT_ONCE_MIN), _ROWS_AT_ONCE_MAX)
        self._table.add_rows(count)
        self._own.frombytes(bytes(8 * count))
        self._free.extend(array("I", range(start + count - 1, start - 1, -1)))
