"""What a full block holds, as values to compare: its chained hash, its tokens and its extra keys.

Owns the step from a token list to a chain of block contents, incrementally. It never decides whether two contents are
the same block: that also needs the parent's identity, which only the block pool knows.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.protocol.block_hash import ExtraKey


class BlockContent(NamedTuple):
    block_hash: int
    tokens: bytes
    extra_keys: tuple[ExtraKey, ...]


class ContentChain:
    """The contents of a sequence's full blocks, first to last."""
