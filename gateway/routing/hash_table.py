"""64-bit hash -> small integer id, in flat arrays: 16 bytes an entry where a dict of ints takes 116.

Owns buckets and their chains; ids are given out by whoever owns the columns beside it. It must never be asked for id
0, which means "none". Keys should be hashes already: a bucket is chosen by their low bits.

Buckets grow a few at a time (linear hashing): no insertion ever pays for the whole table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

FIRST_BUCKETS = 256
SPLIT_AT_ONCE = 1024
AT_ONCE_MIN = 96   # below, one after the other is quicker


class HashTable:
    """`key_of[id]` is the key of an entry; `following[id]` the next in its bucket, 0 also for an id in none."""

    __slots__ = ("following", "heads", "high_mask", "key_of", "mask", "num_entries", "split")

    def __init__(self) -> None:
        self.key_of = array("Q", [0])
        self.following = array("I", [0])
        self.heads = array("I", bytes(4 * FIRST_BUCKETS))
        self.mask = FIRST_BUCKETS - 1
        self.high_mask = 2 * FIRST_BUCKETS - 1
        self.split = 0  # buckets below this one use the higher mask already
        self.num_entries = 0

    def find(self, key: int) -> int:
        """The id of `key`, 0 when it is not there."""
        slot = key & self.mask
        if slot < self.split:
            slot = key & self.high_mask
        entry, key_of = self.heads[slot], self.key_of
        while entry and key_of[entry] != key:
            entry = self.following[entry]
        return entry

    def find_each(self, keys: Iterable[int]) -> list[int]:
        """The ids of `keys`, up to the first that is not there."""
        heads, following, key_of = self.heads, self.following, self.key_of
        mask, high_mask, split = self.mask, self.high_mask, self.split
        found: list[int] = []
        for key in keys:
            slot = key & mask
            if slot < split:
                slot = key & high_mask
            entry = heads[slot]
            while entry and key_of[entry] != key:
                entry = following[entry]
            if not entry:
                break
            found.append(entry)
        return found

    def insert(self, key: int, entry: int) -> bool:
        """`entry`, an id below len(key_of) that is in no bucket, is `key` from now on; False where `key` is there."""
        slot = key & self.mask
        if slot < self.split:
            slot = key & self.high_mask
        heads, key_of = self.heads, self.key_of
        first = other = heads[slot]
        while other:
            if key_of[other] == key:
                return False
            other = self.following[other]
        key_of[entry] = key
        self.following[entry] = first
        heads[slot] = entry
        self.num_entries += 1
        if self.num_entries > len(heads):
            self.make_room()
        return True

    def insert_each(self, keys: Sequence[int], entries: Sequence[int]) -> int:
        """insert() of each of `keys` as the id beside it, up to the first key that is there already; how many."""
        num_inserted = len(keys)
        if num_inserted < AT_ONCE_MIN or not self._insert_at_once(keys, entries):
            num_inserted = self._insert_in_turn(keys, entries)
        self.num_entries += num_inserted
        while self.num_entries > len(self.heads):
            self.make_room()
        return num_inserted

    def _insert_in_turn(self, keys: Sequence[int], entries: Sequence[int]) -> int:
        """Into the buckets, up to the first key that is there already; how many."""
        heads, following, key_of = self.heads, self.following, self.key_of
        mask, high_mask, split = self.mask, self.high_mask, self.split
        pairs: Iterable[tuple[int, int]]
        if type(entries) is range:
            key_of[entries.start:entries.stop] = array("Q", keys)
            pairs = enumerate(keys, entries.start)
        else:
            pairs = list(zip(entries, keys, strict=True))
            for entry, key in pairs:
                key_of[entry] = key
        for entry, key in pairs:
            slot = key & mask
            if slot < split:
                slot = key & high_mask
            other = heads[slot]
            if other:
                following[entry] = other
                while other and key_of[other] != key:
                    other = following[other]
                if other:
                    following[entry] = 0
                    return entries.index(entry)
            heads[slot] = entry
        return len(keys)

    def _insert_at_once(self, keys: Sequence[int], entries: Sequence[int]) -> bool:
        """Into the buckets, if none of `keys` is there and none comes twice; whether that is so. All are looked up
        together: most of an insertion is waiting for memory."""
        if len(set(keys)) < len(keys):
            return False
        given = np.frombuffer(array("Q", keys), np.uint64)
        heads, following, key_of = self._views()
        slots = given & np.uint64(self.mask)
        slots = np.where(slots < self.split, given & np.uint64(self.high_mask), slots).astype(np.intp)
        others = level = heads.take(slots)
        while level.any():
            if (key_of.take(level) == given).any():   # perhaps 0, which stands for none: the other way tells
                return False
            level = following.take(level)
        ids = np.array(entries, np.uint32)
        key_of[ids] = given
        following[ids] = others
        heads[slots] = ids
        for index in (heads.take(slots) != ids).nonzero()[0].tolist():   # another of them is in this bucket
            following[ids[index]] = heads[slots[index]]
            heads[slots[index]] = ids[index]
        return True

    def delete(self, entry: int) -> None:
        """Take `entry` out of its bucket."""
        key = self.key_of[entry]
        slot = key & self.mask
        if slot < self.split:
            slot = key & self.high_mask
        following = self.following
        other = self.heads[slot]
        if other == entry:
            self.heads[slot] = following[entry]
        else:
            while following[other] != entry:
                other = following[other]
            following[other] = following[entry]
        following[entry] = 0
        self.num_entries -= 1

    def make_room(self) -> None:
        """Split the next buckets in two: one more bucket for an entry is the measure."""
        first, high_mask = self.split, self.high_mask
        count = min(SPLIT_AT_ONCE, self.mask + 1 - first)
        self.heads.frombytes(bytes(4 * count))
        heads, following, key_of = self._views()
        level = heads[first:first + count].copy()
        heads[first:first + count] = 0
        while (level := level[level.nonzero()]).size:
            # One entry of each old bucket at a time, so that no two of a level share a new one.
            deeper = following.take(level)
            slots = (key_of.take(level) & np.uint64(high_mask)).astype(np.intp)
            following[level] = heads.take(slots)
            heads[slots] = level
            level = deeper
        self.split += count
        if self.split > self.mask:
            self.mask, self.high_mask, self.split = high_mask, 2 * high_mask + 1, 0

    def _views(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the three columns. They must not outlive a call: an array that is looked at cannot grow."""
        return (np.frombuffer(self.heads, np.uint32), np.frombuffer(self.following, np.uint32),
                np.frombuffer(self.key_of, np.uint64))

    def add_rows(self, count: int) -> None:
        """Room for ids up to `count` more."""
        self.key_of.frombytes(bytes(8 * count))
        self.following.frombytes(bytes(4 * count))

    def entries(self) -> list[int]:
        """Every id, by walking every bucket."""
        found: list[int] = []
        for slot, entry in enumerate(self.heads):
            while entry:
                key = self.key_of[entry]
                assert slot == (key & self.high_mask if key & self.mask < self.split else key & self.mask), \
                    "an entry hangs in another bucket than its own"
                found.append(entry)
                entry = self.following[entry]
        return found

    def check_invariants(self) -> None:
        """AssertionError names what is wrong. Walks everything."""
        found = self.entries()
        assert len(found) == len(set(found)) == self.num_entries, "entries and their count differ"
        assert len({self.key_of[entry] for entry in found}) == len(found), "a key is there twice"
        assert len(self.heads) == self.mask + 1 + self.split, "buckets and masks differ"
