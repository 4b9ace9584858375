"""The block tree: every known block under its parent, and for each block a mask of who reaches it.

Owns the shape (ids, parents, children, recency of leaves) and the reach masks. It knows bits, never endpoints: who
owns a bit, and what a claim is, is prefix_index.py's business.

A bit is set in a block's mask when its owner claims the block *and every block before it*. So masks only ever lose
bits on the way down a chain, and a match is a bisection over masks instead of a walk, also after a removal from the
middle: that clears the bit in the whole subtree at once, which a worker that frees tails first never makes us do.

Blocks are small integers into flat arrays, not objects: a million of them are nothing to the garbage collector, whose
pauses would otherwise be the gateway's worst latency. Id 0 is the root: parent of every first block, with every bit
set. Within the arrays 0 therefore also reads as "no child" and "no sibling", since the root is neither.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

ROOT = 0
GROWTH_BLOCKS = 1024
_FREE = -1  # in num_claims: the id is on the free list


class BlockTree:
    """A forest of hash chains under one root. Every method leaves `check_invariants()` true."""

    def __init__(self) -> None:
        self.id_of: dict[int, int] = {}
        self.mask: list[int] = [-1]
        self.parent = array("i", [ROOT])
        self.first_child = array("i", [0])
        self.next_sibling = array("i", [0])
        self.num_claims = array("i", [0])
        self.leaves: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of = array("Q", [0])
        self._previous_sibling = array("i", [0])
        self._free: list[int] = []
        self._touched: set[int] = set()

    def __len__(self) -> int:
        return len(self.id_of)

    def extend(self, parent: int, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids of the chain `hashes` below `parent`: those known already, then those made now (unclaimed, mask 0).

        The chain ends early where a hash is known under another parent: two prefixes collided, and only the first
        keeps the name.
        """
        known: list[int] = []
        id_of, parent_of = self.id_of, self.parent
        for block_hash in hashes:
            block = id_of.get(block_hash)
            if block is None:
                break
            if parent_of[block] != parent:
                return known, []
            known.append(block)
            parent = block
        rest = hashes[len(known):] if known else hashes
        fresh = self._unknown_run(rest) if len(rest) > 1 else rest
        return known, self._append(parent, fresh) if fresh else []

    def grant(self, blocks: Sequence[int], bits: int, claimed_bits: Callable[[int], int]) -> None:
        """`blocks`, a chain, became claimed for `bits`: set those that reach it, and below it where claims wait.

        `claimed_bits(block)` says which bits of this owner a block further down is claimed for.
        """
        mask, parent, first_child, next_sibling = self.mask, self.parent, self.first_child, self.next_sibling
        seen_mask = seen_gain = widened = -1
        last = len(blocks) - 1
        for index, block in enumerate(blocks):
            old = mask[block]
            gained = bits & mask[parent[block]] & ~old
            if not gained:
                continue
            if old != seen_mask or gained != seen_gain:
                seen_mask, seen_gain, widened = old, gained, old | gained
            mask[block] = widened  # one integer object for a run of equal masks
            child = first_child[block]
            if child and (index == last or child != blocks[index + 1] or next_sibling[child]):
                self._grant_below(block, gained, claimed_bits)

    def grant_fresh(self, blocks: Sequence[int], bits: int) -> None:
        """As grant(), for blocks that extend() just made: nothing hangs below them, each gets its first claim."""
        reach = bits & self.mask[self.parent[blocks[0]]]
        mask, num_claims = self.mask, self.num_claims
        for block in blocks:
            mask[block] = reach
            num_claims[block] = 1

    def revoke(self, block: int, bits: int) -> None:
        """The claim for `bits` on `block` ended: nothing below is reached through it any more."""
        mask, first_child, next_sibling = self.mask, self.first_child, self.next_sibling
        waiting = [block]
        while waiting:
            block = waiting.pop()
            lost = bits & mask[block]
            if not lost:
                continue
            mask[block] &= ~lost
            child = first_child[block]
            while child:
                waiting.append(child)
                child = next_sibling[child]

    def discard_unclaimed(self, block: int) -> int:
        """Drop `block` if nobody claims it and nothing hangs below it, then its parent on the same terms.

        Returns the first that stays, perhaps `block` itself. An id that is free already stays free.
        """
        while block != ROOT and not self.num_claims[block] and not self.first_child[block]:
            parent = self.parent[block]
            self._unlink(block, parent)
            block = parent
        return block

    def touch(self, block: int) -> None:
        """`block` was asked for: it goes last among the leaves, now or when it becomes one."""
        if block in self.leaves:
            self.leaves.move_to_end(block)
        elif block != ROOT:
            self._touched.add(block)

    def demote(self, block: int) -> None:
        """The child of `block` went for being the oldest; `block` is next, unless it was itself asked for."""
        if block not in self.leaves:
            return
        if block in self._touched:
            self._touched.discard(block)
        else:
            self.leaves.move_to_end(block, last=False)

    def children(self, block: int) -> Iterator[int]:
        child = self.first_child[block]
        while child:
            yield child
            child = self.next_sibling[child]

    def check_invariants(self) -> None:
        """AssertionError names what is wrong. Walks everything."""
        seen: set[int] = set()
        waiting = [ROOT]
        while waiting:
            block = waiting.pop()
            before = 0
            for child in self.children(block):
                assert self.parent[child] == block, "child and parent disagree"
                assert self._previous_sibling[child] == before, "siblings disagree"
                assert not self.mask[child] & ~self.mask[block], "a block is reached where its parent is not"
                assert child not in seen, "a block hangs in two places"
                before = child
                seen.add(child)
                waiting.append(child)
        assert seen == set(self.id_of.values()), "blocks in the map and in the tree differ"
        assert all(self._hash_of[block] == block_hash for block_hash, block in self.id_of.items())
        assert set(self.leaves) == {b for b in seen if not self.first_child[b]}, "leaves differ"
        assert self._touched <= seen, "a block that is gone is marked as touched"
        assert all(self.num_claims[b] > 0 or self.first_child[b] for b in seen), "an unclaimed leaf was kept"
        assert all(self.num_claims[b] == _FREE and not self.mask[b] for b in self._free), "a free id is in use"
        assert len(self.mask) == 1 + len(seen) + len(self._free), "an id leaked"

    def _unknown_run(self, hashes: Sequence[int]) -> Sequence[int]:
        """The part of `hashes` before the first that is known, or repeats: it hangs elsewhere, hence a collision."""
        if self.id_of.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes):
            return hashes
        seen: set[int] = set()
        for index, block_hash in enumerate(hashes):
            if block_hash in self.id_of or block_hash in seen:
                return hashes[:index]
            seen.add(block_hash)
        return hashes

    def _append(self, parent: int, hashes: Sequence[int]) -> list[int]:
        blocks = self._reserve(len(hashes))
        self.id_of.update(zip(hashes, blocks, strict=True))
        self._link_first(blocks[0], parent)
        hash_of, parent_of, first_child, num_claims = self._hash_of, self.parent, self.first_child, self.num_claims
        for block, block_hash in zip(blocks, hashes, strict=True):
            hash_of[block] = block_hash
            parent_of[block] = parent
            first_child[parent] = block
            num_claims[block] = 0
            parent = block
        self.leaves[parent] = None
        return blocks

    def _link_first(self, block: int, parent: int) -> None:
        """`block` becomes the first child of `parent`; _append sets the rest of it."""
        sibling = self.first_child[parent]
        self.next_sibling[block] = sibling
        if sibling:
            self._previous_sibling[sibling] = block
        elif parent in self.leaves:
            # Its recency lives on in the child, which is newer.
            del self.leaves[parent]

    def _reserve(self, count: int) -> list[int]:
        if count > len(self._free):
            self._grow(max(count, GROWTH_BLOCKS))
        blocks = self._free[-count:]
        del self._free[-count:]
        return blocks

    def _grow(self, count: int) -> None:
        start = len(self.mask)
        self.mask.extend([0] * count)
        zeros = bytes(count * self.parent.itemsize)
        for column in (self.parent, self.first_child, self.next_sibling, self._previous_sibling):
            column.frombytes(zeros)
        self.num_claims.extend([_FREE] * count)
        self._hash_of.frombytes(bytes(count * self._hash_of.itemsize))
        self._free.extend(range(start + count - 1, start - 1, -1))

    def _unlink(self, block: int, parent: int) -> None:
        before, after = self._previous_sibling[block], self.next_sibling[block]
        if before:
            self.next_sibling[before] = after
        else:
            self.first_child[parent] = after
        if after:
            self._previous_sibling[after] = before
        if parent != ROOT and not self.first_child[parent]:
            self.leaves[parent] = None
        del self.id_of[self._hash_of[block]]
        del self.leaves[block]
        self._touched.discard(block)
        self.next_sibling[block] = self._previous_sibling[block] = 0
        self.mask[block] = 0
        self.num_claims[block] = _FREE
        self._free.append(block)

    def _grant_below(self, block: int, gained: int, claimed_bits: Callable[[int], int]) -> None:
        mask = self.mask
        waiting = [(block, gained)]
        while waiting:
            block, bits = waiting.pop()
            for child in self.children(block):
                reached = bits & claimed_bits(child) & ~mask[child]
                if reached:
                    mask[child] |= reached
                    waiting.append((child, reached))
