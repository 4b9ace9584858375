"""The sweep: endpoints that are gone leave the prefix index a slice at a time.

Owns the progress of one sweep. From the moment of the purge nothing matches them any more (their bits are retired),
so a sweep only gives memory back, and may take as many turns of the event loop as it likes.

Two passes: over the holder sets, which are few, rewriting each where it stands; then over the blocks for those that
nobody claims any more, some nanoseconds for each that is looked at and about a microsecond for each that goes.
"""

from __future__ import annotations

import numpy as np

from gateway.routing.block_tree import BlockTree
from gateway.routing.holder_sets import NOBODY, HolderSets

ROWS_AT_ONCE = 1 << 15
# In the unit that step() counts in, one block discarded: about a microsecond.
COST_OF_ROWS = 64
SETS_AT_ONCE = 128
COST_OF_SETS = 32


class Sweep:
    """Takes `bits` out of every holder set."""

    def __init__(self, tree: BlockTree, sets: HolderSets, bits: int) -> None:
        self.bits = bits
        self._tree = tree
        self._sets = sets
        self._next_set = NOBODY
        self._num_sets = len(sets.claimed)  # sets made later are without those bits
        self._emptied: list[int] = []
        self._rows_left = 0
        self._unclaimed: list[int] = []

    def step(self, num_blocks: int) -> bool:
        """Work for about as long as it takes to discard so many blocks. False: it is done."""
        while num_blocks > 0:
            if self._next_set < self._num_sets:
                self._rewrite_some()
                num_blocks -= COST_OF_SETS
            elif self._unclaimed:
                num_blocks -= self._discard(self._unclaimed[-num_blocks:])
            elif self._rows_left and self._emptied:
                self._look_further()
                num_blocks -= COST_OF_ROWS
            else:
                return False
        return True

    def _rewrite_some(self) -> None:
        last = min(self._next_set + SETS_AT_ONCE, self._num_sets)
        rewrite, bits = self._sets.rewrite, self.bits
        self._emptied += [number for number in range(self._next_set, last) if rewrite(number, bits)]
        self._next_set = last
        self._rows_left = len(self._tree.set_of)  # rows made from now on are not in the emptied sets

    def _look_further(self) -> None:
        """From the last row to the first: children mostly stand behind their parents."""
        self._emptied = [number for number in self._emptied if not self._sets.claimed[number]]
        start = max(0, self._rows_left - ROWS_AT_ONCE)
        numbers = np.frombuffer(self._tree.set_of[start:self._rows_left], np.uint32)
        is_unclaimed = numbers == self._emptied[0] if len(self._emptied) == 1 else np.isin(numbers, self._emptied)
        self._unclaimed = (np.flatnonzero(is_unclaimed) + start).tolist()
        self._rows_left = start

    def _discard(self, blocks: list[int]) -> int:
        del self._unclaimed[-len(blocks):]
        tree, sets = self._tree, self._sets
        for block in reversed(blocks):
            number = tree.set_of[block]
            if number and not sets.claimed[number]:  # nobody took it up again in the meantime
                tree.set_of[block] = NOBODY
                sets.move(number, NOBODY, 1)
                tree.discard_childless(block)
        return len(blocks)
