"""Which lives of which workers an operator drained, and which of those put back, for every process of a gateway, also
one that starts later.

Owns: the list in shared memory, written under the lock; the oldest of DRAINS_MAX words is forgotten. A drain is for
one life of a worker: its next life begins without.
"""

from __future__ import annotations

import asyncio

from gateway.shared.segment import DRAINS_MAX, Segment, key_of

SEEN_WITHIN_S = 2.0
_POLL_S = 0.01
_COUNT_AT = 2


class DrainBoard:
    """The list as the process of `row` sees it."""

    def __init__(self, segment: Segment, row: int) -> None:
        self._segment = segment
        self._row = row

    @property
    def count(self) -> int:
        """Words on it so far: when it grows, somebody has asked for something."""
        return self._segment.words[_COUNT_AT]

    def add(self, endpoint_id: str, epoch: str) -> int:
        """Drain this life of the worker; the count by which everybody will have seen it."""
        return self._write(_drained(endpoint_id, epoch), instead_of=_lifted(endpoint_id, epoch))

    def lift(self, endpoint_id: str, epoch: str) -> int:
        """Put this life of the worker back; as add()."""
        return self._write(_lifted(endpoint_id, epoch), instead_of=_drained(endpoint_id, epoch))

    def holds(self, endpoint_id: str, epoch: str) -> bool:
        """Whether this life of the worker is drained."""
        return _drained(endpoint_id, epoch) in self._entries()

    def is_lifted(self, endpoint_id: str, epoch: str) -> bool:
        """Whether this life of the worker was put back after a drain."""
        return _lifted(endpoint_id, epoch) in self._entries()

    def seen(self, count: int) -> None:
        """This process acts on the first `count` drains."""
        self._segment.saw_drains(self._row, count)

    async def seen_by_all(self, count: int) -> bool:
        """Returns when every living process acts on it; False when one has not within SEEN_WITHIN_S."""
        deadline = asyncio.get_running_loop().time() + SEEN_WITHIN_S
        while any(self._segment.drains_seen(row) < count for row in self._segment.living()):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _entries(self) -> list[int]:
        at = self._segment.layout.drains_at
        return self._segment.words[at:at + DRAINS_MAX].tolist()

    def _write(self, entry: int, *, instead_of: int) -> int:
        words, at = self._segment.words, self._segment.layout.drains_at
        with self._segment.locked:
            for index, other in enumerate(self._entries()):
                if other == instead_of:
                    words[at + index] = 0
            words[at + words[_COUNT_AT] % DRAINS_MAX] = entry
            words[_COUNT_AT] += 1
            return words[_COUNT_AT]


def _drained(endpoint_id: str, epoch: str) -> int:
    return key_of(f"{len(endpoint_id)}:{endpoint_id}{epoch}")


def _lifted(endpoint_id: str, epoch: str) -> int:
    return key_of(f"lifted {len(endpoint_id)}:{endpoint_id}{epoch}")
