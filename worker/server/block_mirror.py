"""What the engine's pool holds, as told by its own events: the source of GET /kv/snapshot. Pure.

Owns {block hash -> block}. Fed with exactly the events that are published, in the same order, so a snapshot taken
between two batches equals what a reader of every batch so far knows. Never asks the pool itself: that lives in
another process.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from worker.protocol.cache_events import BlockRemoved, BlockStored, CacheEvent


class BlockMirror:
    """Applies events; hands out the present content in an order that a reader can apply."""

    def __init__(self) -> None:
        self._blocks: dict[int, BlockStored] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Take a batch of events in order. Removing an unknown block is harmless: vLLM's format permits repeats."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._blocks.pop(block_hash, None)
            else:
                self._blocks.clear()

    def blocks(self) -> list[BlockStored]:
        """A frozen copy as one event per block, parents before children.

        A child can be older than its parent here: the parent was evicted and computed again while the child stayed.
        """
        ordered: dict[int, BlockStored] = {}
        for block_hash in self._blocks:
            for ancestor in reversed(list(self._unlisted_chain(block_hash, ordered))):
                ordered[ancestor] = self._blocks[ancestor]
        return list(ordered.values())

    def _unlisted_chain(self, block_hash: int, listed: Container[int]) -> Iterator[int]:
        """This block and its ancestors, nearest first, up to the first that is listed or not held."""
        walked: set[int] = set()
        current: int | None = block_hash
        # `walked` ends a cycle, which only colliding hashes could make.
        while current is not None and current in self._blocks and current not in listed and current not in walked:
            walked.add(current)
            yield current
            current = self._blocks[current].parent_block_hash

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for index, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size:(index + 1) * event.block_size]
            extra_keys = (event.extra_keys[index],) if event.extra_keys and event.extra_keys[index] else ()
            self._blocks[block_hash] = BlockStored(
                block_hashes=(block_hash,), parent_block_hash=parent, token_ids=tokens, block_size=event.block_size,
                extra_keys=extra_keys, medium=event.medium)
            parent = block_hash
