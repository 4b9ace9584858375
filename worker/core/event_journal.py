"""The cache events since somebody last took them, in order, runs coalesced.

Owns the pending events of one pool. It never decides what is an event: the block pool appends, the engine takes once
per step.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.core.block_content import BlockContent
from worker.protocol.block_hash import unpack_tokens
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent


class _Run(NamedTuple):
    """Blocks stored one behind the other on one chain; becomes one BlockStored."""

    parent_hash: int | None
    last_serial: int
    contents: list[BlockContent]


class EventJournal:
    """`num_pending_blocks` counts block entries, not events, and is what the owner bounds."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pending: list[_Run | list[int] | AllBlocksCleared] = []
        self.num_pending_blocks = 0

    def stored(self, content: BlockContent, serial: int, *, parent_hash: int | None,
               parent_serial: int | None) -> None:
        """A block became findable behind its parent (None, None for a first block)."""
        self.num_pending_blocks += 1
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _Run) and last.last_serial == parent_serial:
            last.contents.append(content)
            self._pending[-1] = last._replace(last_serial=serial)
        else:
            self._pending.append(_Run(parent_hash, serial, [content]))

    def removed(self, block_hash: int) -> None:
        self.num_pending_blocks += 1
        last = self._pending[-1] if self._pending else None
        if isinstance(last, list):
            last.append(block_hash)
        else:
            self._pending.append([block_hash])

    def cleared(self) -> None:
        """Everything is gone, so whatever was pending says nothing any more."""
        self._pending = [AllBlocksCleared()]
        self.num_pending_blocks = 0

    def take(self) -> list[CacheEvent]:
        pending, self._pending, self.num_pending_blocks = self._pending, [], 0
        return [self._event(item) for item in pending]

    def _event(self, item: _Run | list[int] | AllBlocksCleared) -> CacheEvent:
        if isinstance(item, AllBlocksCleared):
            return item
        if isinstance(item, list):
            return BlockRemoved(tuple(item))
        keys = tuple(content.extra_keys for content in item.contents)
        return BlockStored(
            block_hashes=tuple(content.block_hash for content in item.contents),
            parent_block_hash=item.parent_hash,
            token_ids=tuple(unpack_tokens(b"".join(content.tokens for content in item.contents))),
            block_size=self._block_size,
            extra_keys=keys if any(keys) else (),
        )
