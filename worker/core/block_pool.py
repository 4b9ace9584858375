"""All blocks of the KV storage: reference counts, free list and hash map (interface first)."""

from __future__ import annotations

from worker.protocol.block_hash import HashScheme
from worker.protocol.cache_events import CacheEvent


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, scheme: HashScheme, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scheme = scheme
        self.caching = caching
        self.num_evictions = 0
        self.num_recomputed_evicted_tokens = 0

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing findable and have no holder."""
        raise AssertionError("being written")

    @property
    def num_idle(self) -> int:
        """Cached blocks without a holder: they can be hit, and evicted."""
        raise AssertionError("being written")

    @property
    def num_referenced(self) -> int:
        raise AssertionError("being written")

    @property
    def num_sealed(self) -> int:
        """Findable blocks, held or idle."""
        raise AssertionError("being written")

    def take_events(self) -> list[CacheEvent]:
        raise AssertionError("being written")

    def reset(self) -> None:
        raise AssertionError("being written")

    def check_invariants(self) -> None:
        raise AssertionError("being written")
