"""Holder sets: which endpoints claim a block, and which of them reach it, as one small number shared by many blocks.

Owns the sets, each a pair of bit masks (claimed, reached), and how many blocks are in each. It knows bits, never
endpoints or blocks. A set that no block is in is forgotten; its number is used again.

Equal numbers mean equal sets. The reverse may fail after a sweep, which rewrites sets where they stand.
"""

from __future__ import annotations

NOBODY = 0
EVERYBODY = 1  # the root's: reached by all, claimed by none
_ALL_BITS = -1
# Two masks of 64 endpoints, the key, its place in a dict, three places in lists.
SET_BYTES = 420


class HolderSets:
    """`claimed[n]` and `reached[n]` are the masks of set n, `num_blocks[n]` the blocks in it."""

    def __init__(self) -> None:
        self.claimed: list[int] = [0, 0]
        self.reached: list[int] = [0, _ALL_BITS]
        self.num_blocks: list[int] = [1, 1]  # neither is ever forgotten
        self.num_made = 0
        self.retired_bits = 0  # of endpoints that are gone, until sweep() has been everywhere
        self._number_of: dict[tuple[int, int], int] = {(0, 0): NOBODY}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.claimed) - len(self._free)

    def number(self, claimed: int, reached: int) -> int:
        """The number of this set, made if need be; no block is in it by that."""
        retired = self.retired_bits
        if retired:
            claimed &= ~retired
            reached &= ~retired
        key = (claimed, reached)
        number = self._number_of.get(key)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.claimed[number], self.reached[number] = claimed, reached
            else:
                number = len(self.claimed)
                self.claimed.append(claimed)
                self.reached.append(reached)
                self.num_blocks.append(0)
            self._number_of[key] = number
            self.num_made += 1
        return number

    def find(self, claimed: int, reached: int) -> int | None:
        """The number of this set, if there are blocks in it."""
        return self._number_of.get((claimed, reached))

    def move(self, old: int, new: int, count: int) -> None:
        """So many blocks went from one set to the other."""
        num_blocks = self.num_blocks
        num_blocks[new] += count
        num_blocks[old] -= count
        if not num_blocks[old]:
            self._forget(old)

    def rewrite(self, number: int, bits: int) -> bool:
        """Take `bits` out of the set where it stands. True: nobody claims its blocks any more."""
        claimed, reached = self.claimed[number], self.reached[number]
        if not claimed & bits or number <= EVERYBODY:
            return False
        key = (claimed, reached)
        if self._number_of.get(key) == number:
            del self._number_of[key]
        claimed, reached = claimed & ~bits, reached & ~bits
        self.claimed[number], self.reached[number] = claimed, reached
        if claimed:
            self._number_of.setdefault((claimed, reached), number)
        return not claimed

    def check_invariants(self) -> None:
        """AssertionError names what is wrong."""
        for number in range(2, len(self.claimed)):
            claimed, reached = self.claimed[number], self.reached[number]
            assert not reached & ~claimed, "a block is reached by someone who does not claim it"
            assert bool(self.num_blocks[number]) != (number in self._free), "an empty set was kept"
        assert all((self.claimed[n], self.reached[n]) == key for key, n in self._number_of.items())

    def _forget(self, number: int) -> None:
        key = (self.claimed[number], self.reached[number])
        if self._number_of.get(key) == number:
            del self._number_of[key]
        self.claimed[number] = self.reached[number] = 0
        self._free.append(number)
