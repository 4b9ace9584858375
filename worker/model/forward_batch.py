"""What one forward pass computes, in the model's own words: rows of tokens with their places in KV storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Positions [start, start + len(token_ids)) of one sequence.

    `block_table[i]` is the KV block of positions [i * block_size, (i + 1) * block_size). Keys and values are written
    only for positions >= `write_from`; below it they are read from storage. `wants_logits` asks for the last row's,
    behind those of the first `num_scored` rows. `pools`: the sum of all rows' last hidden states is wanted.
    `adapter` is the digest of a loaded LoRA adapter, None for the model as it is.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    write_from: int
    wants_logits: bool
    adapter: bytes | None = None
    num_scored: int = 0
    pools: bool = False


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    sequences: tuple[SequenceRows, ...]
