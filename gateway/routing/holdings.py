"""Holdings: who claims each block, and who reaches it: claims the block *and every block before it*.

Owns the one column that says so, and how it changes: claims come and go, a gap in a chain takes the reach of what
hangs below it at once, its mending gives it back. It knows the tree and one endpoint's bits, never events or bets.

Reach only shrinks on the way down a chain, so a match is a bisection instead of a walk, also after a removal from the
middle, which a worker that frees tails first never makes us do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import xor

import numpy as np

from gateway.routing.block_tree import ROOT, BlockTree
from gateway.routing.claims import Claims
from gateway.routing.holder_sets import EVERYBODY, NOBODY, HolderSets

# Below so many blocks a bisection is cheaper than comparing all of them at once.
COMPARED_AT_ONCE_MIN = 24
NOTHING = 0


class Holdings:
    """The holder sets of the blocks of `tree`."""

    def __init__(self, tree: BlockTree) -> None:
        self.sets = HolderSets()
        self._tree = tree
        self._depth_of_last = 0   # the last index that was known of the last prompt that was not wholly known
        tree.set_of[ROOT] = EVERYBODY

    def bits_of(self, block: int, claims: Claims) -> int:
        """Which of the endpoint's bits are claimed on `block`."""
        return self.sets.claimed[self._tree.set_of[block]] & claims.bits

    def fresh_set(self, parent: int, bits: int) -> int:
        """The set of new blocks below `parent` that are claimed for `bits` alone."""
        reached = bits & self.sets.reached[self._tree.set_of[parent]]
        return self.sets.number(bits, reached)

    def made(self, claims: Claims, holder_set: int, count: int) -> None:
        """So many blocks were made in `holder_set`, for `claims` alone."""
        sets = self.sets
        sets.num_blocks[holder_set] += count
        if sets.claimed[holder_set] != sets.reached[holder_set]:
            claims.num_unreached += count

    def append_one(self, claims: Claims, parent: int, block_hash: int) -> bool:
        """A new block below `parent`, claimed by `claims` alone; False where the hash is known. Mostly the parent is
        so too, and its set will do."""
        sets, bits = self.sets, claims.bits
        number = self._tree.set_of[parent]
        if sets.reached[number] != bits or sets.claimed[number] != bits:
            if self._tree.find(block_hash):
                return False
            number = self.fresh_set(parent, bits)
            claims.num_unreached += sets.reached[number] != bits
        if not self._tree.append_one(parent, block_hash, number):
            return False
        sets.num_blocks[number] += 1
        return True

    def append_each(self, claims: Claims, parents: Sequence[int], hashes: Sequence[int]) -> int:
        """append_one() of each hash below the block that the hash beside it names; up to the first that is known, or
        whose parent is not, or is not reached and held by `claims` alone. How many that were."""
        number = self.sets.find(claims.bits, claims.bits)
        if number is None:
            return 0
        num_made = self._tree.append_each(parents, hashes, number)
        self.sets.num_blocks[number] += num_made
        return num_made

    def grant(self, claims: Claims, blocks: Sequence[int], bits: int) -> None:
        """`blocks`, a chain, become claimed for `bits`: those reach that are reached, and below where claims wait."""
        set_of, sets, mine = self._tree.set_of, self.sets, claims.bits
        above = sets.reached[set_of[self._tree.parent[blocks[0]]]] & mine
        seen = seen_above = new = below = -1
        run = unreached = 0
        for block in blocks:
            old = set_of[block]
            if old != seen or above != seen_above:
                if run:
                    sets.move(seen, new, run)
                claimed, reached = sets.claimed[old], sets.reached[old]
                now = claimed | bits
                below = now & mine & above
                new = sets.number(now, reached | below)
                unreached = (now & mine != below) - ((claimed ^ reached) & mine != 0)
                seen, seen_above, run = old, above, 0
            if new != old:
                set_of[block] = new
                run += 1
                claims.num_unreached += unreached
            above = below
        if run:
            sets.move(seen, new, run)
        if claims.num_unreached:
            for block in blocks:
                self._reach_below(claims, block)

    def drop(self, claims: Claims, block: int, bits: int) -> None:
        """The claim for `bits` on `block` ended: nothing below is reached through it any more."""
        sets, set_of = self.sets, self._tree.set_of
        number = set_of[block]
        claimed, reached = sets.claimed[number], sets.reached[number]
        lost = reached & bits
        if claimed == reached and not claimed & ~bits:
            set_of[block] = NOBODY  # the usual case: nobody else claims it
            sets.move(number, NOBODY, 1)
        else:
            self._put(claims, block, claimed & ~bits, reached & ~bits)
        first_child = self._tree.first_child
        if not lost or not first_child[block]:
            return
        waiting = [block]
        while waiting:
            for child in self._tree.children(waiting.pop()):
                number = self._tree.set_of[child]
                reached = sets.reached[number]
                if reached & lost:
                    self._put(claims, child, sets.claimed[number], reached & ~lost)
                    if first_child[child]:
                        waiting.append(child)

    def clear(self, block: int) -> tuple[int, int]:
        """Nobody claims `block`, a leaf, any more. Returns the bits that claimed and that reached it."""
        number = self._tree.set_of[block]
        was = self.sets.claimed[number], self.sets.reached[number]
        if number != NOBODY:
            self._tree.set_of[block] = NOBODY
            self.sets.move(number, NOBODY, 1)
        return was

    def confirmed_depth(self, claims: Claims, hashes: Sequence[int]) -> int:
        """How far the endpoint's confirmed claims reach along the chain."""
        if not claims.num_confirmed or not hashes:
            return 0
        find, set_of, reached = self._tree.find, self._tree.set_of, self.sets.reached
        bit = claims.confirmed_bit
        if (block := find(hashes[-1])) and reached[set_of[block]] & bit:
            return len(hashes)
        return bisect_left(hashes, True, key=lambda block_hash: not ((block := find(block_hash))
                                                                      and reached[set_of[block]] & bit))

    def ends(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Depths, ascending, and the bits whose reach ends at each, for the chain `hashes` from the root on. The last
        depth is how much of the chain is known. Some bits may be none, or of endpoints that are gone."""
        find, set_of, reached = self._tree.find, self._tree.set_of, self.sets.reached
        first = find(hashes[0]) if hashes else NOTHING
        if not first:
            return [], []
        last_index = self._depth_of_last   # prompts share their beginning, and so its length
        if not (0 < last_index < len(hashes) - 1 and (last := find(hashes[last_index]))
                and not find(hashes[last_index + 1])):
            last_index, last = len(hashes) - 1, find(hashes[-1])
            if not last:
                last_index, last = self._deepest(hashes, first)
        number = set_of[last]
        if set_of[first] == number:
            return [last_index + 1], [reached[number]]
        depths, numbers = self._edges(hashes, first, (last_index, last))
        depths.append(last_index + 1)
        reach = [reached[number] for number in numbers]
        # Reach only shrinks on the way down, so what differs is what is lost.
        return depths, [*map(xor, reach, reach[1:]), reach[-1]]

    def check_invariants(self, claims: Sequence[Claims]) -> None:
        """AssertionError names what is wrong. Walks everything."""
        sets, set_of, blocks = self.sets, self._tree.set_of, self._tree.blocks()
        sets.check_invariants()
        counts = [0] * len(sets.claimed)
        unreached = dict.fromkeys(range(len(claims)), 0)
        for block in blocks:
            number = set_of[block]
            counts[number] += 1
            claimed, above = sets.claimed[number], sets.reached[set_of[self._tree.parent[block]]]
            live = ~sets.retired_bits
            assert not (sets.reached[number] ^ claimed & above) & live, "a block is reached where it should not be"
            for index, mine in enumerate(claims):
                unreached[index] += (claimed ^ sets.reached[number]) & mine.bits != 0
            assert claimed or self._tree.first_child[block] or sets.retired_bits, "an unclaimed leaf was kept"
        assert counts[2:] == sets.num_blocks[2:], "blocks in the sets and their counts differ"
        assert all(unreached[index] == mine.num_unreached for index, mine in enumerate(claims)), "unreached differ"

    def _put(self, claims: Claims, block: int, claimed: int, reached: int) -> None:
        sets, old = self.sets, self._tree.set_of[block]
        was_unreached = (sets.claimed[old] ^ sets.reached[old]) & claims.bits != 0
        claims.num_unreached += ((claimed ^ reached) & claims.bits != 0) - was_unreached
        new = sets.number(claimed, reached)
        if new != old:
            self._tree.set_of[block] = new
            sets.move(old, new, 1)

    def _reach_below(self, claims: Claims, block: int) -> None:
        """Give what hangs below `block` the reach that it now has."""
        sets, set_of, mine = self.sets, self._tree.set_of, claims.bits
        waiting = [block]
        while waiting:
            block = waiting.pop()
            above = sets.reached[set_of[block]] & mine
            for child in self._tree.children(block):
                number = set_of[child]
                claimed, reached = sets.claimed[number], sets.reached[number]
                if above & claimed & ~reached:
                    self._put(claims, child, claimed, reached | above & claimed)
                    waiting.append(child)

    def _deepest(self, hashes: Sequence[int], first: int) -> tuple[int, int]:
        """(index, id) of the last known block: a parent stays for as long as its children, so this is a bisection."""
        find = self._tree.find
        low, block, high = 0, first, len(hashes) - 1
        while high - low > 1:
            middle = (low + high) >> 1
            found = find(hashes[middle])
            if found:
                low, block = middle, found
            else:
                high = middle
        self._depth_of_last = low
        return low, block

    def _edges(self, hashes: Sequence[int], first: int, last: tuple[int, int]) -> tuple[list[int], list[int]]:
        """Indices at which another set begins than that of the block before, and all sets on the way: one more."""
        find, set_of = self._tree.find, self._tree.set_of
        edges: list[int] = []
        numbers = [set_of[first]]
        waiting = [(0, first, *last)]
        while waiting:
            low, low_block, high, high_block = waiting.pop()
            after = set_of[high_block]
            if set_of[low_block] == after:
                continue
            distance = high - low
            if distance == 1:
                edges.append(high)
                numbers.append(after)
                continue
            if (distance >= COMPARED_AT_ONCE_MIN and high_block - low_block == distance
                    and self._tree.is_run(low_block, high_block)):
                column = np.frombuffer(set_of[low_block:high_block + 1], np.uint32)
                steps = (column[1:] != column[:-1]).nonzero()[0] + 1
                edges += (steps + low).tolist()
                numbers += column[steps].tolist()
                continue
            middle = (low + high) >> 1
            block = find(hashes[middle])
            waiting.append((middle, block, high, high_block))
            waiting.append((low, low_block, middle, block))
        return edges, numbers
