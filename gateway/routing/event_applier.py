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
from typing import TypeGuard

from msgspec.structs import replace

from gateway.routing.handles import Handles
from gateway.routing.prefix_index import PrefixIndex
from worker.protocol.block_hash import ExtraKey, HashScheme, continue_chain, next_hash, next_hashes
from worker.protocol.cache_events import BlockRemoved, BlockStored, CacheEvent, EventBatch

# Kind of an extra key in another engine's terms: it makes the chain distinct, and no prompt of ours has it.
FOREIGN_KEY = 255
# A turn of the event loop should not hold more blocks than this: larger events are applied in pieces.
BLOCKS_A_PIECE = 256
# And stores of one block each not more than this; fewer than that are quicker one by one.
ONES_A_PIECE = 64
ONES_TOGETHER_MIN = 8


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
        self.apply_all([(seq, batch)])

    def apply_all(self, batches: Iterable[tuple[int | None, EventBatch]]) -> None:
        """Apply several batches, each behind its sequence number, in order; all at once, see steps()."""
        events = list(self._events_of(batches))
        if len(events) >= ONES_TOGETHER_MIN:
            self.apply_events(events)
            return
        for event in events:   # what a few streams tell of; steps would cost as much as storing
            if type(event) is BlockStored and len(event.block_hashes) <= BLOCKS_A_PIECE:
                self._store(event)
            else:
                self.apply_events([event])

    def steps(self, batches: Iterable[tuple[int | None, EventBatch]]) -> Iterator[None]:
        """Apply the batches piece by piece, so that the caller may pause after each; `last_seq` is set with the last
        event of a batch."""
        return self.event_steps(self._events_of(batches))

    def apply_events(self, events: Iterable[CacheEvent]) -> None:
        for _ in self.event_steps(events):
            pass

    def event_steps(self, events: Iterable[CacheEvent]) -> Iterator[None]:
        """As steps(), for events alone. Stores of one block each that come in a row are looked at together."""
        block_size = self._scheme.block_size
        ones: list[BlockStored] = []
        for event in events:
            one = event if _is_one_more(event, block_size) else None
            if ones and (one is None or len(ones) == ONES_A_PIECE):
                self._store_ones(ones)
                ones = []
                yield
            if one is not None:
                ones.append(one)
            elif type(event) is BlockStored and len(event.block_hashes) <= BLOCKS_A_PIECE:
                self._store(event)
                yield
            else:
                yield from self._steps_of(event)
        if ones:
            self._store_ones(ones)
            yield

    def _events_of(self, batches: Iterable[tuple[int | None, EventBatch]]) -> Iterator[CacheEvent]:
        """A batch of another epoch speaks of another process's blocks and is not applied."""
        for seq, batch in batches:
            if self.epoch is not None and batch.epoch is not None and batch.epoch != self.epoch:
                self.counts.num_other_epoch += 1
                continue
            yield from batch.events
            if seq is not None:
                self.last_seq = seq

    def _steps_of(self, event: CacheEvent) -> Iterator[None]:
        if type(event) is BlockStored:
            for piece in _pieces(event):
                self._store(piece)
                yield
        elif type(event) is BlockRemoved:
            for start in range(0, len(event.block_hashes), BLOCKS_A_PIECE):
                self._remove(event, event.block_hashes[start:start + BLOCKS_A_PIECE])
                yield
        else:
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
        if num_blocks == 1 and self._store_next(event):
            return
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

    def _store_next(self, event: BlockStored) -> bool:
        """Whether the usual case holds: an engine that hashes as we do has one more block in a chain that it holds.
        Then it is stored."""
        block_size = self._scheme.block_size
        if len(self._handles) or not _is_one_more(event, block_size):
            return False
        parent, block_hash = event.parent_block_hash or 0, event.block_hashes[0]
        if (next_hash(parent, event.token_ids, block_size) != block_hash
                or not self._index.store_next(self._endpoint_id, parent, block_hash)):
            return False
        self.event_block_size = block_size
        self.counts.num_stored += 1
        return True

    def _store_ones(self, events: Sequence[BlockStored]) -> None:
        """_store() of each, in this order; all of them satisfy _is_one_more()."""
        num_done = 0
        if len(events) >= ONES_TOGETHER_MIN and not len(self._handles):
            num_done = self._store_together(events)
        for event in events[num_done:]:
            self._store(event)

    def _store_together(self, events: Sequence[BlockStored]) -> int:
        """As many as that is quicker for, from the first on. Blocks of an engine that hashes in its own way have to
        be stored one by one, and so has whatever the index does not take together with others."""
        parents = [event.parent_block_hash or 0 for event in events]
        own = next_hashes(parents, [event.token_ids for event in events], self._scheme.block_size)
        if own != [event.block_hashes[0] for event in events]:
            return 0
        self.event_block_size = self._scheme.block_size
        num_done = 0
        while num_stored := self._index.store_each(self._endpoint_id, parents[num_done:], own[num_done:]):
            self.counts.num_stored += num_stored
            num_done += num_stored
            if num_done < len(own):
                self._store(events[num_done])
                num_done += 1
        return num_done

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


def _is_one_more(event: CacheEvent, block_size: int) -> TypeGuard[BlockStored]:
    """Whether one block without anything special follows another in the fast tier, as in a decoding engine."""
    return (type(event) is BlockStored and len(event.block_hashes) == 1
            and event.block_size == block_size == len(event.token_ids)
            and event.parent_block_hash is not None and event.medium == "GPU"
            and not (event.extra_keys or event.foreign_extra_keys or event.group_idx))


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
