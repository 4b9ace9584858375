"""The block tree: every known block under its parent.

Owns the shape: names (hash to id), parents, children, recency of leaves, and the column that says which holder set
each block is in. It knows numbers of sets, never endpoints: who claims and who reaches is holdings.py's business.

Blocks are small integers into flat arrays, not objects: ten million of them are nothing to the garbage collector,
whose pauses would otherwise be the gateway's worst latency. Id 0 is the root: parent of every first block. Within the
arrays 0 therefore also reads as "no child" and "no sibling", since the root is neither.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from gateway.routing.free_ids import FreeIds
from gateway.routing.hash_table import HashTable

ROOT = 0
FIRST_ROWS = 64
VECTOR_MIN = 24  # below, numpy costs more than it saves
RUN_MIN = 5      # and below, doing a run at once
ROWS_AT_ONCE_MAX = 1 << 13
# Of the columns below: key 8, following 4, bucket 4, parent, first child, two siblings, set 4 each, touched 1; and
# what arrays are ahead of their use.
ROW_BYTES = 41
_FREE = -1  # as a parent: the id is on the free list


class BlockTree:
    """A forest of hash chains under one root. Every method leaves `check_invariants()` true."""

    def __init__(self) -> None:
        self.names = HashTable()
        self.parent = array("i", [ROOT])
        self.first_child = array("i", [0])
        self.next_sibling = array("i", [0])
        self.set_of = array("I", [0])
        self.leaves: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.find = self.names.find
        self._previous_sibling = array("i", [0])
        self._free = FreeIds()
        self._touched = bytearray(1)

    def __len__(self) -> int:
        return self.names.num_entries

    def known(self, parent: int, hashes: Sequence[int]) -> tuple[list[int], bool]:
        """Ids of the beginning of the chain `hashes` below `parent` that is known; whether it ends in a collision:
        the next hash is known under another parent. Two prefixes collided, and only the first keeps the name."""
        known: list[int] = []
        find, parent_of = self.find, self.parent
        for block_hash in hashes:
            block = find(block_hash)
            if not block:
                break
            if parent_of[block] != parent:
                return known, True
            known.append(block)
            parent = block
        return known, False

    def append_one(self, parent: int, block_hash: int, holder_set: int) -> int:
        """A new block below `parent`, in `holder_set`; 0 where the hash is known."""
        free, first_child, leaves = self._free, self.first_child, self.leaves
        block = free.first
        if block == free.end:
            block = self._refill()
        if not self.names.insert(block_hash, block):
            return 0
        free.first = block + 1
        self.parent[block] = parent
        self.set_of[block] = holder_set
        if first_child[parent]:
            self._link_first(block, parent)
        else:  # as there, in the order of a chain that grows
            first_child[parent] = block
            leaves.pop(parent, None)
        leaves[block] = None
        return block

    def append_each(self, parents: Sequence[int], hashes: Sequence[int], holder_set: int) -> int:
        """append_one() of each hash below the block that the hash beside it names; up to the first that is known, or
        whose parent is not or is in another set than `holder_set`. How many that were."""
        blocks = self._take_each(len(hashes))
        num_named = self.names.insert_each(hashes, blocks)
        if num_named < len(hashes):
            parents = parents[:num_named]
        num_made = self._link_each(self.names.find_each(parents), blocks, holder_set)
        if num_made < len(hashes):
            for block in blocks[num_made:num_named]:
                self.names.delete(block)
            for block in reversed(blocks[num_made:]):
                self._free.give_back(block)
        return num_made

    def append(self, parent: int, hashes: Sequence[int], holder_set: int) -> list[int]:
        """New blocks for the chain `hashes` below `parent`, all in `holder_set`; fewer, where a hash is known."""
        blocks: list[int] = []
        if len(hashes) < RUN_MIN:
            for block_hash in hashes:
                parent = self.append_one(parent, block_hash, holder_set)
                if not parent:
                    break
                blocks.append(parent)
            return blocks
        free = self._free
        while hashes:
            if free.first == free.end:
                self._refill(len(hashes))
            first = free.take(len(hashes))
            count = free.first - first
            num_made = self.names.insert_each(hashes if count == len(hashes) else hashes[:count],
                                              range(first, free.first))
            if num_made < count:
                free.first = first + num_made
            if num_made:
                ids = self._link_run(parent, first, holder_set, num_made)
                blocks += ids
                parent = first + num_made - 1
            if num_made < count:
                break
            hashes = hashes[count:]
        if blocks:
            self.leaves[parent] = None
        return blocks

    def discard_childless(self, block: int) -> int:
        """Drop `block` if it is in no holder set and nothing hangs below it, then its parent on the same terms.

        Returns the first that stays, perhaps `block` itself. An id that is free already stays free.
        """
        set_of, first_child, parent_of = self.set_of, self.first_child, self.parent
        while not (set_of[block] or first_child[block]):  # the root is in a set
            parent = parent_of[block]
            if parent == _FREE:
                break
            self._unlink(block, parent)
            block = parent
        return block

    def touch(self, block: int) -> None:
        """`block` was asked for: it goes last among the leaves, now or when it becomes one."""
        if block in self.leaves:
            self.leaves.move_to_end(block)
        elif block != ROOT:
            self._touched[block] = 1

    def demote(self, block: int) -> None:
        """The child of `block` went for being the oldest; `block` is next, unless it was itself asked for."""
        if block not in self.leaves:
            return
        if self._touched[block]:
            self._touched[block] = 0
        else:
            self.leaves.move_to_end(block, last=False)

    def children(self, block: int) -> Iterator[int]:
        child = self.first_child[block]
        while child:
            yield child
            child = self.next_sibling[child]

    def is_run(self, first: int, last: int) -> bool:
        """Whether each of the consecutive ids from `first` to `last` is the parent of the next."""
        return self.parent[first + 1:last + 1].tobytes() == np.arange(first, last, dtype=np.int32).tobytes()

    def memory_bytes(self) -> int:
        """Of the rows in use; leaves and sets are counted by others. Free rows are used again, never given back."""
        return ROW_BYTES * len(self)

    def blocks(self) -> list[int]:
        """Every known block, by walking the table of names."""
        return self.names.entries()

    def check_invariants(self) -> None:
        """AssertionError names what is wrong. Walks everything."""
        self.names.check_invariants()
        seen: set[int] = set()
        waiting = [ROOT]
        while waiting:
            block = waiting.pop()
            before = 0
            for child in self.children(block):
                assert self.parent[child] == block, "child and parent disagree"
                assert self._previous_sibling[child] == before, "siblings disagree"
                assert child not in seen, "a block hangs in two places"
                before = child
                seen.add(child)
                waiting.append(child)
        assert seen == set(self.blocks()), "blocks in the table and in the tree differ"
        assert set(self.leaves) == {b for b in seen if not self.first_child[b]}, "leaves differ"
        free = list(self._free)
        assert all(self.parent[b] == _FREE and not self.set_of[b] for b in free), "a free id is in use"
        assert not any(self._touched[b] for b in free), "a block that is gone is marked as touched"
        assert len(free) == len(set(free)), "an id is free twice"
        assert len(self.parent) == 1 + len(seen) + len(free), "an id leaked"

    def _link_run(self, parent: int, first: int, holder_set: int, count: int) -> array[int]:
        """So many ids from `first` on become a chain below `parent`. Returns them."""
        last = first + count
        ids = _ids(first, count)
        self.parent[first + 1:last] = ids[:-1]
        self.parent[first] = parent
        self.first_child[first:last - 1] = ids[1:]
        self.first_child[last - 1] = 0
        self.set_of[first:last] = array("I", (holder_set,)) * count
        self._link_first(first, parent)
        return ids

    def _link_each(self, parents: Sequence[int], blocks: Sequence[int], holder_set: int) -> int:
        """Each block below the parent beside it and in its set, up to the first parent in another one, as those not
        yet linked are; how many."""
        parent_of, set_of, first_child, leaves = self.parent, self.set_of, self.first_child, self.leaves
        for block, parent in zip(blocks, parents, strict=False):
            if set_of[parent] != holder_set:
                return blocks.index(block)
            set_of[block] = holder_set
            parent_of[block] = parent
            if first_child[parent]:
                self._link_first(block, parent)
            else:
                first_child[parent] = block
                leaves.pop(parent, None)
            leaves[block] = None
        return len(parents)

    def _link_first(self, block: int, parent: int) -> None:
        """`block` becomes the first child of `parent`."""
        sibling = self.first_child[parent]
        self.first_child[parent] = block
        self.next_sibling[block] = sibling
        if sibling:
            self._previous_sibling[sibling] = block
        elif parent in self.leaves:
            # Its recency lives on in the child, which is newer.
            del self.leaves[parent]

    def _take_each(self, count: int) -> Sequence[int]:
        """So many free ids, in the order in which one after the other would be taken."""
        free = self._free
        if free.end - free.first >= count:
            return range(free.take(count), free.first)
        blocks: list[int] = []
        while len(blocks) < count:
            if free.first == free.end:
                self._refill(count - len(blocks))
            first = free.take(count - len(blocks))
            blocks += range(first, free.first)
        return blocks

    def _refill(self, at_least: int = 1) -> int:
        """Another run of free ids; more rows, if there is none. Returns its first."""
        if not self._free.next_run():
            self._grow(at_least)
        return self._free.first

    def _grow(self, at_least: int) -> None:
        """In steps that stay small beside the whole, and beside a turn of the event loop."""
        start = len(self.parent)
        count = max(min(max(start // 8, FIRST_ROWS), ROWS_AT_ONCE_MAX), min(at_least, ROWS_AT_ONCE_MAX))
        zeros = bytes(4 * count)
        for column in (self.first_child, self.next_sibling, self._previous_sibling, self.set_of):
            column.frombytes(zeros)
        self.parent.extend(array("i", [_FREE]) * count)
        self._touched.extend(bytes(count))
        self.names.add_rows(count)
        self._free.add_run(start, start + count)

    def _unlink(self, block: int, parent: int) -> None:
        before, after = self._previous_sibling[block], self.next_sibling[block]
        if before or after:
            if before:
                self.next_sibling[before] = after
                self._previous_sibling[block] = 0
            else:
                self.first_child[parent] = after
            if after:
                self._previous_sibling[after] = before
                self.next_sibling[block] = 0
        else:
            self.first_child[parent] = 0
            if parent:
                self.leaves[parent] = None
        self.names.delete(block)
        del self.leaves[block]
        self._touched[block] = 0
        self.parent[block] = _FREE
        self._free.give_back(block)


def _ids(first: int, count: int) -> array[int]:
    """So many consecutive ids."""
    return array("i", range(first, first + count)) if count < VECTOR_MIN else array(
        "i", np.arange(first, first + count, dtype=np.int32).tobytes())
