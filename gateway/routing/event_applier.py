"""The event applier: one endpoint's cache events -> claims in the prefix index.

Owns the endpoint's handles: engine hash -> own hash. The engine's hash is never trusted as content; our own chain is
computed from the parent, the tokens and the extra keys of each event, and the engine's hash only says later which
block was removed or extended. Where both are equal, as with our own workers, no handle is kept at all.

It must never see a sequence number or a socket: gaps, replays and epochs are the feed's business, which calls
reset(). A store that it cannot place (unknown parent, another block size, a group other than the first) is counted,
not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.routing.handles import Handles
from gateway.routing.prefix_index import PrefixIndex
from worker.protocol.block_hash import ExtraKey, HashScheme, continue_chain
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EventBatch

# Kind of an extra key in another engine's terms: it makes the chain distinct, and no prompt of ours has it.
FOREIGN_KEY = 255
# A turn of the event loop should not hold more blocks than this: larger events are applied in pieces.
BLOCKS_A_PIECE = 256


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
        self._handles = Handles()

    @property
    def num_handles(self) -> int:
        """Engine hashes that differ from ours and are remembered: as many as the engine's blocks, at most."""
        return len(self._handles)

    def memory_bytes(self) -> int:
        """An estimate from the counts; the index does not include it."""
        return self._handles.memory_bytes()

    def apply(self, batch: EventBatch, seq: int | None = None) -> None:
        """Apply every event of the batch, in order; all at once, see steps()."""
        for _ in self.steps(batch, seq):
            pass

    def steps(self, batch: EventBatch, seq: int | None = None) -> Iterator[None]:
        """Apply the batch piece by piece, so that the caller may pause after each; `last_seq` is set with the last.

        A batch of another epoch speaks of another process's blocks and is not applied.
        """
        if self.epoch is not None and batch.epoch is not None and batch.epoch != self.epoch:
            self.counts.num_other_epoch += 1
            return
        yield from self.event_steps(batch.events)
        if seq is not None:
            self.last_seq = seq

    def apply_events(self, events: Iterable[CacheEvent]) -> None:
        for _ in self.event_steps(events):
            pass

    def event_steps(self, events: Iterable[CacheEvent]) -> Iterator[None]:
        """As steps(), for events alone."""
        for event in events:
            if isinstance(event, BlockStored):
                if len(event.block_hashes) <= BLOCKS_A_PIECE:
                    self._store(event)
                    yield
                    continue
                for piece in _pieces(event):
                    self._store(piece)
                    yield
            elif isinstance(event, BlockRemoved):
                for start in range(0, len(event.block_hashes), BLOCKS_A_PIECE):
                    self._remove(event, event.block_hashes[start:start + BLOCKS_A_PIECE])
                    yield
            elif isinstance(event, AllBlocksCleared):
                self.counts.num_cleared += 1
                self.reset()
                yield

    def reset(self) -> None:
        """Forget all that the endpoint holds, bets included: it cleared its cache, restarted, or we lost track.

        At once for whoever asks; the index gives the memory back in its own sweeps.
        """
        self._index.retire(self._endpoint_id)
        self._handles = Handles()

    def _store(self, event: BlockStored) -> None:
        num_blocks = len(event.block_hashes)
        scheme = self._scheme
        self.event_block_size = event.block_size
        if not self._understood(event):
            return
        parent = None
        if event.parent_block_hash is not None:
            parent = self._own(event.parent_block_hash)
            if parent is None:
                self.counts.num_orphans += num_blocks
                return
        own = continue_chain(scheme.root() if parent is None else parent, event.token_ids, scheme,
                             _keys_of_blocks(event))
        tier = event.medium.lower()
        num_stored = self._index.store(self._endpoint_id, own, tier, parent=parent)
        self.counts.num_stored += num_stored
        if num_stored != num_blocks:
            self.counts.num_refused += num_blocks - num_stored
        if own[-1] != event.block_hashes[-1] or tuple(own) != event.block_hashes:
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
        own = self._handles.get(engine_hash) if len(self._handles) else None
        if own is None and self._index.holds(self._endpoint_id, engine_hash):
            return engine_hash
        return own

    def _keep_handles(self, engine_hashes: Sequence[int], own_hashes: Sequence[int], tier: str) -> None:
        handles = self._handles
        for engine_hash, own in zip(engine_hashes, own_hashes, strict=False):
            before = handles.get(engine_hash)
            if before == own:
                handles.add_reference(engine_hash)
            elif before is not None or engine_hash != own:
                if before is not None:
                    # The engine names other content by this hash now, so what it named before is gone.
                    self._index.remove(self._endpoint_id, [before], tier)
                handles.put(engine_hash, own)

    def _remove(self, event: BlockRemoved, block_hashes: Sequence[int]) -> None:
        if event.group_idx:
            self.counts.num_other_group += len(block_hashes)
            return
        tier = event.medium.lower()
        if not len(self._handles):
            num_removed = self._index.remove(self._endpoint_id, block_hashes, tier)
        else:
            num_removed = sum(self._remove_one(engine_hash, tier) for engine_hash in block_hashes)
        self.counts.num_removed += num_removed
        self.counts.num_unknown_removed += len(block_hashes) - num_removed

    def _remove_one(self, engine_hash: int, tier: str) -> int:
        own = self._handles.get(engine_hash)
        if own is None:
            return self._index.remove(self._endpoint_id, [engine_hash], tier)
        num_removed = self._index.remove(self._endpoint_id, [own], tier)
        if num_removed or not self._index.holds(self._endpoint_id, own):
            self._handles.drop_reference(engine_hash)
        return num_removed


def _pieces(event: BlockStored) -> Iterator[BlockStored]:
    """A large store as several, each the continuation of the one before. A store whose counts disagree stays whole,
    to be refused as such."""
    num_blocks, size = len(event.block_hashes), event.block_size
    if len(event.token_ids) != num_blocks * size or len(event.extra_keys) not in (0, num_blocks):
        yield event
        return
    for start in range(0, num_blocks, BLOCKS_A_PIECE):
        end = start + BLOCKS_A_PIECE
        yield replace(
            event, block_hashes=event.block_hashes[start:end], token_ids=event.token_ids[start * size:end * size],
            parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
            extra_keys=event.extra_keys[start:end], foreign_extra_keys=event.foreign_extra_keys[start:end])


def _keys_of_blocks(event: BlockStored) -> Sequence[Sequence[ExtraKey]]:
    """Our extra keys per block. What another engine hashes by, in its own terms, becomes an opaque key: such blocks
    keep their place in the tree and match nothing of ours."""
    foreign = event.foreign_extra_keys
    if event.parent_block_hash is not None and not foreign:
        return event.extra_keys
    at_root = () if event.parent_block_hash is not None else tuple(
        value for value in (event.lora_name, event.lora_id, event.cache_salt) if value is not None)
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
