"""What a full block holds, as values to compare: its chained hash, its tokens and its extra keys.

Owns the step from a token list to a chain of block contents, each computed once and appended as tokens arrive. It
never decides whether two blocks are the same: that also needs the parent's identity, which only the pool knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.protocol.block_hash import (
    TOKEN_BYTES,
    ChainHasher,
    ExtraKey,
    HashScheme,
    extra_keys_of_block,
    pack_tokens,
)


class BlockContent(NamedTuple):
    """One full block. `tokens` are its ids packed as u32: 4 bytes a token to keep, one memcmp to compare."""

    block_hash: int
    tokens: bytes
    extra_keys: tuple[ExtraKey, ...] = ()


class ContentChain:
    """The contents of a sequence's full blocks, first to last; `blocks` grows with append()."""

    __slots__ = ("_block_bytes", "_hasher", "_keys_of", "_tail", "blocks")

    def __init__(self, scheme: HashScheme, extra_keys: Sequence[ExtraKey] = ()) -> None:
        self.blocks: list[BlockContent] = []
        self._block_bytes = scheme.block_size * TOKEN_BYTES
        indices = {key.start // scheme.block_size for key in extra_keys}
        self._keys_of = {index: extra_keys_of_block(index, scheme.block_size, extra_keys) for index in indices}
        self._hasher = ChainHasher(scheme, extra_keys)
        self._tail = b""

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that follow; `blocks` gains an entry for each block they fill."""
        packed = self._tail + pack_tokens(token_ids)
        at = 0
        for block_hash in self._hasher.append(token_ids):
            tokens = packed[at:at + self._block_bytes]
            self.blocks.append(BlockContent(block_hash, tokens, self._keys_of.get(len(self.blocks), ())))
            at += self._block_bytes
        self._tail = packed[at:]
