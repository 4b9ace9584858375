"""Which idle block is forgotten first, and what is remembered of the forgotten ones.

Owns the order of idle blocks and the ghost list. It knows no tokens, hashes no tokens and frees nothing: the block
pool asks for a victim and does the rest. Tail-first order is the pool's doing (release() adds a chain's last block
first), so the oldest idle block never has a findable child.

Known approximation: recency only. Frequency and the waiting queue's wishes are not weighed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LruOrder:
    """Idle blocks, the least recently released first. Every operation is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """Block ids in the order in which they would be evicted."""
        return iter(self._order)

    def add(self, block_id: int) -> None:
        assert block_id not in self._order, f"block {block_id} is idle already"
        self._order[block_id] = None

    def remove(self, block_id: int) -> None:
        """Take a block out because it has a holder again; KeyError when it is not idle."""
        del self._order[block_id]

    def pop_oldest(self) -> int:
        """The block to forget; KeyError when none is idle."""
        return self._order.popitem(last=False)[0]

    def clear(self) -> None:
        self._order.clear()


class GhostList:
    """Hashes of evicted blocks, so that computing one of them again is recognised. The oldest fall out.

    An approximation for counting only: a colliding hash counts as the block it collides with.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block_hash: int) -> None:
        self._hashes[block_hash] = None
        self._hashes.move_to_end(block_hash)
        if len(self._hashes) > self._max_entries:
            self._hashes.popitem(last=False)

    def discard(self, block_hash: int) -> bool:
        """Forget a ghost; whether there was one."""
        if block_hash not in self._hashes:
            return False
        del self._hashes[block_hash]
        return True

    def clear(self) -> None:
        self._hashes.clear()
