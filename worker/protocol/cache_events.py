"""KV events in vLLM's wire format (interface first; the body is being written)."""

from __future__ import annotations

from dataclasses import dataclass

from worker.protocol.block_hash import ExtraKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became findable. `extra_keys` is parallel to `block_hashes` (empty: none have any)."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    medium: str = "GPU"
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[int, ...]
    medium: str = "GPU"
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
