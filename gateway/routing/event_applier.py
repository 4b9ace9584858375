"""The event applier: one endpoint's cache events -> claims in the prefix index.

Owns the endpoint's handles: engine hash -> own hash. The engine's hash is never trusted as content; our own chain is
computed from the parent, the tokens and the extra keys of each event, and the engine's hash only says later which
block was removed or extended. Where both are equal, as with our own workers, no handle is kept at all.

It must never see a sequence number or a socket: gaps, replays and epochs are the feed's business, which calls
reset(). A store that it cannot place (unknown parent, another block size, a group other than the first) is counted,
not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.routing.prefix_index import PrefixIndex
from worker.protocol.block_hash import ExtraKey, HashScheme, continue_chain
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EventBatch

# Kind of an extra key in another engine's terms: it makes the chain distinct, and no prompt of ours has it.
FOREIGN_KEY = 255
# An entry of a dict at its emptiest and two integers.
HANDLE_BYTES = 168


@dataclass(slots=True)
class AppliedCounts:
    """Blocks, since the applier was made. All but the first three are symptoms.

    `num_orphans`: the parent is unknown, so events were lost (or the index, full, has dropped it). `num_refused`: the
    index, full, has dropped the parent. `num_wrong_block_size`, `num_other_group`: the engine caches in a shape that
    we do not index. `num_malformed`: tokens, keys and blocks disagree. `num_unknown_removed`: removals of what was
    not held; counts never go below zero. `num_other_epoch` counts batches.
    """

    num_stored: int = 0
    num_removed: int = 0
    num_cleared: int = 0
    num_orphans: int = 0
    num_refused: int = 0
    num_wrong_block_size: int = 0
    num_other_group: int = 0
    num_malformed: int = 0
    num_unknown_removed: int = 0
    num_other_epoch: int = 0


class EventApplier:
    """For one endpoint in one epoch (None: an engine that states none). After a restart make another.

    `last_seq` is the last batch applied; the feed reads it.
    """

    def __init__(self, index: PrefixIndex, endpoint_id: str, scheme: HashScheme, epoch: str | None = None) -> None:
        self.counts = AppliedCounts()
        self.epoch = epoch
        self.last_seq: int | None = None
        self.event_block_size: int | None = None
        self._index = index
        self._endpoint_id = endpoint_id
        self._scheme = scheme
        self._own_of: dict[int, int] = {}
        self._more_references: dict[int, int] = {}  # engine hash -> references beyond the first

    @property
    def num_handles(self) -> int:
        """Engine hashes that differ from ours and are remembered: as many as the engine's blocks, at most."""
        return len(self._own_of)

    def memory_bytes(self) -> int:
        """An estimate from the counts; the index does not include it."""
        return HANDLE_BYTES * (len(self._own_of) + len(self._more_references))

    def apply(self, batch: EventBatch, seq: int | None = None) -> None:
        """Apply every event of the batch, in order. A batch of another epoch speaks of another process's blocks."""
        if self.epoch is not None and batch.epoch is not None and batch.epoch != self.epoch:
            self.counts.num_other_epoch += 1
            return
        self.apply_events(batch.events)
        if seq is not None:
            self.last_seq = seq

    def apply_events(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.counts.num_cleared += 1
                self.reset()

    def reset(self) -> None:
        """Forget all that the endpoint holds, bets included: it cleared its cache, restarted, or we lost track."""
        self._index.purge(self._endpoint_id)
        self._own_of.clear()
        self._more_references.clear()

    def _store(self, event: BlockStored) -> None:
        num_blocks = len(event.block_hashes)
        self.event_block_size = event.block_size
        if not self._understood(event):
            return
        parent = None
        if event.parent_block_hash is not None:
            parent = self._own(event.parent_block_hash)
            if parent is None:
                self.counts.num_orphans += num_blocks
                return
        own = continue_chain(self._scheme.root() if parent is None else parent, event.token_ids, self._scheme,
                             _keys_of_blocks(event))
        tier = event.medium.lower()
        num_stored = self._index.store(self._endpoint_id, own, tier, parent=parent)
        self.counts.num_stored += num_stored
        self.counts.num_refused += num_blocks - num_stored
        if tuple(own) != event.block_hashes:
            self._keep_handles(event.block_hashes, own[:num_stored], tier)

    def _understood(self, event: BlockStored) -> bool:
        """Whether the store can be indexed; otherwise counts why not."""
        num_blocks, counts = len(event.block_hashes), self.counts
        if event.group_idx:
            counts.num_other_group += num_blocks
        elif event.block_size != self._scheme.block_size:
            counts.num_wrong_block_size += num_blocks
        elif len(event.token_ids) != num_blocks * event.block_size or len(event.extra_keys) not in (0, num_blocks):
            counts.num_malformed += num_blocks
        else:
            return num_blocks > 0
        return False

    def _own(self, engine_hash: int) -> int | None:
        own = self._own_of.get(engine_hash)
        if own is None and self._index.holds(self._endpoint_id, engine_hash):
            return engine_hash
        return own

    def _keep_handles(self, engine_hashes: Sequence[int], own_hashes: Sequence[int], tier: str) -> None:
        for engine_hash, own in zip(engine_hashes, own_hashes, strict=False):
            before = self._own_of.get(engine_hash)
            if before == own:
                self._more_references[engine_hash] = self._more_references.get(engine_hash, 0) + 1
            elif before is not None or engine_hash != own:
                if before is not None:
                    # The engine names other content by this hash now, so what it named before is gone.
                    self._index.remove(self._endpoint_id, [before], tier)
                self._own_of[engine_hash] = own

    def _remove(self, event: BlockRemoved) -> None:
        if event.group_idx:
            self.counts.num_other_group += len(event.block_hashes)
            return
        tier = event.medium.lower()
        if not self._own_of:
            num_removed = self._index.remove(self._endpoint_id, event.block_hashes, tier)
        else:
            num_removed = sum(self._remove_one(engine_hash, tier) for engine_hash in event.block_hashes)
        self.counts.num_removed += num_removed
        self.counts.num_unknown_removed += len(event.block_hashes) - num_removed

    def _remove_one(self, engine_hash: int, tier: str) -> int:
        own = self._own_of.get(engine_hash)
        if own is None:
            return self._index.remove(self._endpoint_id, [engine_hash], tier)
        num_removed = self._index.remove(self._endpoint_id, [own], tier)
        if num_removed or not self._index.holds(self._endpoint_id, own):
            self._drop_handle(engine_hash)
        return num_removed

    def _drop_handle(self, engine_hash: int) -> None:
        more = self._more_references.pop(engine_hash, 0)
        if more > 1:
            self._more_references[engine_hash] = more - 1
        elif not more:
            del self._own_of[engine_hash]


def _keys_of_blocks(event: BlockStored) -> Sequence[Sequence[ExtraKey]]:
    """Our extra keys per block. What another engine hashes by, in its own terms, becomes an opaque key: such blocks
    keep their place in the tree and match nothing of ours."""
    at_root = () if event.parent_block_hash is not None else tuple(
        value for value in (event.lora_name, event.lora_id, event.cache_salt) if value is not None)
    foreign = event.foreign_extra_keys
    if not at_root and not any(key is not None for key in foreign):
        return event.extra_keys
    keys: list[list[ExtraKey]] = [list(block_keys) for block_keys in event.extra_keys]
    keys += [[] for _ in range(len(event.block_hashes) - len(keys))]
    for index, value in enumerate([*foreign][:len(keys)]):
        if value is not None:
            keys[index].append(ExtraKey(FOREIGN_KEY, repr(value).encode()))
    if at_root and keys:
        keys[0].append(ExtraKey(FOREIGN_KEY, repr(at_root).encode()))
    return keys
