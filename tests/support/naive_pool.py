"""The block pool as a page of plain lists: no hashes, no serials, no constant-time anything.

A block is findable under its whole prefix, spelled out. It has BlockPool's interface, so that a scheduler can run on
either and must plan the same steps; and it keeps no events: EventMirror checks the real ones against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from worker.core.block_content import BlockContent
from worker.core.block_pool import Matchable
from worker.protocol.block_hash import HashScheme, pack_tokens
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

Prefix = tuple[tuple[bytes, tuple], ...]


class NaivePool:
    def __init__(self, num_blocks: int, block_size: int, scheme: HashScheme, *, caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.scheme, self.caching = num_blocks, block_size, scheme, caching
        self.refs = [0] * num_blocks
        self.prefixes: list[Prefix | None] = [None] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.order = list(range(num_blocks))  # available blocks, the next to use first
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        return sum(count == 0 for count in self.refs)

    @property
    def num_idle(self) -> int:
        return sum(count == 0 and prefix is not None for count, prefix in zip(self.refs, self.prefixes, strict=True))

    @property
    def num_free(self) -> int:
        return self.num_available - self.num_idle

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_sealed(self) -> int:
        return sum(prefix is not None for prefix in self.prefixes)

    def free_order(self) -> list[int]:
        return list(self.order)

    def ref_count(self, block_id: int) -> int:
        return self.refs[block_id]

    def num_held_alone(self, block_ids: Iterable[int]) -> int:
        return len([block_id for block_id in block_ids if self.refs[block_id] == 1])

    def matchable(self, contents: Iterable[BlockContent], *, behind: int | None = None) -> Matchable:
        found: list[int] = []
        before = () if behind is None else self.prefixes[behind]
        assert before is not None
        prefix: Prefix = before
        for content in contents:
            prefix = (*prefix, (content.tokens, content.extra_keys))
            if prefix not in self.prefixes:
                break
            found.append(self.prefixes.index(prefix))
        return Matchable(tuple(found), len([block_id for block_id in found if self.refs[block_id] == 0]))

    def match(self, contents: Iterable[BlockContent], *, behind: int | None = None) -> list[int]:
        found = list(self.matchable(contents, behind=behind).block_ids)
        for block_id in found:
            self._hold(block_id)
        return found

    def acquire(self, num_blocks: int) -> list[int] | None:
        if num_blocks > self.num_available:
            return None
        taken = self.order[:num_blocks]
        for block_id in taken:
            self.num_evictions += self.prefixes[block_id] is not None
            self.prefixes[block_id] = self.hashes[block_id] = None
            self._hold(block_id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.order.insert(0 if self.prefixes[block_id] is None else len(self.order), block_id)

    def seal(self, block_id: int, content: BlockContent, *, parent: int | None) -> int | None:
        if not self.caching:
            return None
        before = () if parent is None else self.prefixes[parent]
        assert before is not None
        prefix = (*before, (content.tokens, content.extra_keys))
        if prefix in self.prefixes:
            earlier = self.prefixes.index(prefix)
            self._hold(earlier)
            self.release([block_id])
            return earlier
        self.prefixes[block_id], self.hashes[block_id] = prefix, content.block_hash
        return block_id

    def forgive(self, contents: Iterable[BlockContent]) -> None:
        pass

    def reset(self) -> None:
        for block_id in list(self.order):
            if self.prefixes[block_id] is not None:
                self.prefixes[block_id] = self.hashes[block_id] = None
                self.order.remove(block_id)
                self.order.insert(0, block_id)

    def take_events(self) -> list[CacheEvent]:
        return []

    def check_invariants(self) -> None:
        assert sorted(self.order) == [block_id for block_id, count in enumerate(self.refs) if count == 0]

    def _hold(self, block_id: int) -> None:
        if self.refs[block_id] == 0:
            self.order.remove(block_id)
        self.refs[block_id] += 1


class EventMirror:
    """What a reader of the events believes. Every event must make sense to it when it comes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.hashes: Counter[int] = Counter()
        self.contents: Counter[tuple[int, bytes, tuple]] = Counter()

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.hashes.clear()
                self.contents.clear()
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    assert self.hashes[block_hash] > 0, "removed what was never stored"
                    self.hashes[block_hash] -= 1
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == self._block_size
        assert len(event.token_ids) == len(event.block_hashes) * self._block_size
        assert event.parent_block_hash is None or self.hashes[event.parent_block_hash] > 0, "stored behind nothing"
        keys = event.extra_keys or ((),) * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes)
        for index, block_hash in enumerate(event.block_hashes):
            tokens = pack_tokens(event.token_ids[index * self._block_size:(index + 1) * self._block_size])
            self.contents[block_hash, tokens, keys[index]] += 1
            self.hashes[block_hash] += 1

    def check_against(self, naive: NaivePool) -> None:
        """The events told exactly what is findable; nothing was announced with other tokens or keys."""
        assert +self.hashes == Counter(block_hash for block_hash in naive.hashes if block_hash is not None)
        for block_hash, prefix in zip(naive.hashes, naive.prefixes, strict=True):
            if prefix is not None:
                assert (block_hash, *prefix[-1]) in self.contents
