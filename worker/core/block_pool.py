"""All blocks of the KV storage: who holds them, which are findable, which may be used next.

Owns reference counts, the free list, the seals and the hash map, and reports their changes as cache events. It never
touches a tensor and never decides which sequence gets a block.

A block is in exactly one of three sets, and free + idle + referenced = total:

    free        no holder, nothing findable in it; used before any cached block is evicted
    idle        no holder, sealed: can be hit, and evicted, the least recently released first
    referenced  one or more holders, sealed or not; never evicted

A *seal* makes a block findable: hash, tokens, extra keys and the parent's seal serial, written once, only after the
block's K/V exist. Serials are never reused, so "same tokens behind the same parent serial" means the same prefix. The
hash only finds candidates; tokens, extra keys and parent decide, so a collision costs time and never content.

Every holder of a sealed block holds its parent too, and release() goes tail first. So a parent always outlives its
children in the idle order: whatever is findable can be reached from the root.

Duplicates are not kept: sealing what is sealed already hands the caller the first copy and frees the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.core.block_content import BlockContent
from worker.core.event_journal import EventJournal
from worker.core.eviction import GhostList, LruOrder
from worker.protocol.block_hash import HashScheme
from worker.protocol.cache_events import CacheEvent

# Genuine collisions of a 64-bit keyed hash: two are a curiosity, more are a bug or a stub.
MAX_BLOCKS_PER_HASH = 16
# Evicted hashes remembered, per block of the pool.
GHOSTS_PER_BLOCK = 4
# Block entries pending before the journal is replaced by "cleared" and a list of what is there.
MAX_PENDING_PER_BLOCK = 8


@dataclass(frozen=True, slots=True)
class _Seal:
    serial: int
    block_id: int
    content: BlockContent
    parent_serial: int | None
    parent_hash: int | None


class Matchable(NamedTuple):
    """What a look-up would find now, first block to last. `num_idle` of these count as available until pinned."""

    block_ids: tuple[int, ...]
    num_idle: int


class BlockPool:
    """`num_blocks` blocks of `block_size` token positions. With caching off nothing is ever sealed or matched."""

    def __init__(self, num_blocks: int, block_size: int, scheme: HashScheme, *, caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: the KV memory must hold at least one block")
        if block_size != scheme.block_size:
            raise ValueError(f"block_size is {block_size}, but the hash scheme says {scheme.block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scheme = scheme
        self.caching = caching
        self.num_evictions = 0
        self.num_recomputed_evicted_tokens = 0
        self._ref_counts = [0] * num_blocks
        self._seals: list[_Seal | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed is used first
        self._idle = LruOrder()
        self._by_hash: dict[int, tuple[_Seal, ...]] = {}
        self._num_sealed = 0
        self._next_serial = 1
        self._ghosts = GhostList(GHOSTS_PER_BLOCK * num_blocks)
        self._journal = EventJournal(block_size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that acquire() can hand out: free ones, and idle ones by evicting them."""
        return len(self._free) + len(self._idle)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_sealed(self) -> int:
        """Findable blocks, referenced or idle."""
        return self._num_sealed

    def free_order(self) -> list[int]:
        """Block ids in the order in which acquire() would use them."""
        return [*reversed(self._free), *self._idle]

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def num_held_alone(self, block_ids: Iterable[int]) -> int:
        """How many of a holder's blocks would become available if it let go."""
        return sum(self._ref_counts[block_id] == 1 for block_id in block_ids)

    def matchable(self, contents: Iterable[BlockContent], *, behind: int | None = None) -> Matchable:
        """The longest chain of `contents` that is findable now. Reads only; nothing is pinned.

        `behind`: the chain goes on from this sealed block, which somebody holds; None: from the root.
        """
        block_ids = tuple(seal.block_id for seal in self._walk(contents, behind))
        return Matchable(block_ids, sum(not self._ref_counts[block_id] for block_id in block_ids))

    def match(self, contents: Iterable[BlockContent], *, behind: int | None = None) -> list[int]:
        """The longest findable chain of `contents`, with a reference on each block for the caller to release."""
        matched = []
        for seal in self._walk(contents, behind):
            self._hold(seal.block_id)
            matched.append(seal.block_id)
        return matched

    def acquire(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks of undefined contents, one reference each. Without room: None, and nothing changed."""
        if num_blocks > self.num_available:
            return None
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._evict_oldest()
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference on each block of a table, given first to last; the tail becomes the first to evict."""
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} has no holder"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id]:
                continue
            if self._seals[block_id] is None:
                self._free.append(block_id)
            else:
                self._idle.add(block_id)

    def seal(self, block_id: int, content: BlockContent, *, parent: int | None) -> int | None:
        """Make a held, fully computed block findable behind `parent`, the sealed block before it (None: the first).

        Returns the block to hold from now on: this one, or the copy that was sealed earlier (the reference moves
        over). None when it cannot be sealed, because caching is off or MAX_BLOCKS_PER_HASH others share the hash.
        """
        assert self._ref_counts[block_id] == 1, f"block {block_id} is sealed without its one holder"
        assert self._seals[block_id] is None, f"block {block_id} is sealed already: hash and tokens are write-once"
        if not self.caching:
            return None
        parent_seal = None if parent is None else self._seals[parent]
        assert parent is None or parent_seal is not None, f"block {block_id} is sealed before its parent"
        earlier = self._find(content, parent_seal)
        if earlier is not None:
            self._hold(earlier.block_id)
            self.release([block_id])
            return earlier.block_id
        same_hash = self._by_hash.get(content.block_hash, ())
        if len(same_hash) >= MAX_BLOCKS_PER_HASH:
            return None
        seal = _Seal(self._next_serial, block_id, content, *_identity(parent_seal))
        self._next_serial += 1
        self._num_sealed += 1
        self._seals[block_id] = seal
        self._by_hash[content.block_hash] = (*same_hash, seal)
        self._announce(seal)
        if self._ghosts.discard(content.block_hash):
            self.num_recomputed_evicted_tokens += self.block_size
        return block_id

    def forgive(self, contents: Iterable[BlockContent]) -> None:
        """Computing these again has another cause (a preemption) and is counted there, not as evicted."""
        for content in contents:
            self._ghosts.discard(content.block_hash)

    def reset(self) -> None:
        """Forget every idle block. AllBlocksCleared is announced, then what survives because it has a holder."""
        for block_id in self._idle:
            self._unseal(block_id)
            self._free.append(block_id)
        self._idle.clear()
        self._ghosts.clear()
        self._announce_everything()

    def take_events(self) -> list[CacheEvent]:
        """What became findable or was forgotten since the last call, in order."""
        return self._journal.take()

    def check_invariants(self) -> None:
        """AssertionError when the pool's own books disagree. O(num_blocks): for tests, and for idle moments."""
        free, idle = set(self._free), list(self._idle)
        referenced = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(idle) + len(referenced) == self.num_blocks, "free + idle + referenced != total"
        assert free | set(idle) | referenced == set(range(self.num_blocks)), "a block is in none or two of the sets"
        assert all(self._seals[block_id] is None for block_id in free), "a free block is findable"
        assert all(self._seals[block_id] is not None for block_id in idle), "an idle block is not findable"
        self._check_map()
        self._check_chains({block_id: position for position, block_id in enumerate(idle)})

    def _check_map(self) -> None:
        for block_hash, same_hash in self._by_hash.items():
            assert 1 <= len(same_hash) <= MAX_BLOCKS_PER_HASH, "a bucket is empty or beyond its limit"
            for seal in same_hash:
                assert seal.content.block_hash == block_hash, "a seal lies under another hash"
                assert self._seals[seal.block_id] is seal, "the map names a block that is not sealed so"
        assert self.num_sealed == sum(seal is not None for seal in self._seals), "the count of sealed blocks is off"
        assert self.num_sealed == sum(map(len, self._by_hash.values())), "a sealed block is not in the map"

    def _check_chains(self, idle_position: dict[int, int]) -> None:
        sealed = {seal.serial: seal for seal in self._seals if seal is not None}
        assert len({(s.parent_serial, s.content) for s in sealed.values()}) == len(sealed), "a duplicate is sealed"
        for seal in sealed.values():
            if seal.parent_serial is None:
                continue
            parent = sealed.get(seal.parent_serial)
            assert parent is not None, f"block {seal.block_id} is findable, but its parent was forgotten"
            assert self._ref_counts[parent.block_id] >= self._ref_counts[seal.block_id], "a child outlives its parent"
            if parent.block_id in idle_position:
                assert idle_position[seal.block_id] < idle_position[parent.block_id], "a parent goes before its child"

    def _walk(self, contents: Iterable[BlockContent], behind: int | None) -> Iterator[_Seal]:
        seal = None if behind is None else self._seals[behind]
        assert behind is None or seal is not None, f"block {behind} is not sealed: nothing can be findable behind it"
        for content in contents:
            seal = self._find(content, seal)
            if seal is None:
                return
            yield seal

    def _find(self, content: BlockContent, parent: _Seal | None) -> _Seal | None:
        """The hash is a hint; tokens, extra keys and the parent's identity are the proof."""
        parent_serial = None if parent is None else parent.serial
        for seal in self._by_hash.get(content.block_hash, ()):
            if seal.content == content and seal.parent_serial == parent_serial:
                return seal
        return None

    def _hold(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            self._idle.remove(block_id)
        self._ref_counts[block_id] += 1

    def _evict_oldest(self) -> int:
        block_id = self._idle.pop_oldest()
        assert self._ref_counts[block_id] == 0, f"block {block_id} is evicted from under its holder"
        seal = self._unseal(block_id)
        self._ghosts.add(seal.content.block_hash)
        self._journal.removed(seal.content.block_hash)
        self.num_evictions += 1
        return block_id

    def _unseal(self, block_id: int) -> _Seal:
        """Map entry and block state change together."""
        seal = self._seals[block_id]
        assert seal is not None, f"block {block_id} is not sealed"
        self._seals[block_id] = None
        self._num_sealed -= 1
        rest = tuple(other for other in self._by_hash[seal.content.block_hash] if other is not seal)
        if rest:
            self._by_hash[seal.content.block_hash] = rest
        else:
            del self._by_hash[seal.content.block_hash]
        return seal

    def _announce(self, seal: _Seal) -> None:
        self._journal.stored(seal.content, seal.serial, parent_hash=seal.parent_hash,
                             parent_serial=seal.parent_serial)
        if self._journal.num_pending_blocks > MAX_PENDING_PER_BLOCK * self.num_blocks:
            self._announce_everything()

    def _announce_everything(self) -> None:
        """Start the story over: cleared, then every findable block, parents before children (serials grow)."""
        self._journal.cleared()
        sealed = [seal for seal in self._seals if seal is not None]
        for seal in sorted(sealed, key=lambda seal: seal.serial):
            self._journal.stored(seal.content, seal.serial, parent_hash=seal.parent_hash,
                                 parent_serial=seal.parent_serial)


def _identity(parent: _Seal | None) -> tuple[int | None, int | None]:
    return (None, None) if parent is None else (parent.serial, parent.content.block_hash)
