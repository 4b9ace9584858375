"""Slots of held blocks that hold nothing of use, by reason. Pure counting over running sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from worker.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Waste:
    """In slots. `tail`: beyond the last computed position of a begun block. `reserved`: in blocks not yet begun.
    `duplicate`: of open blocks whose computed positions another sequence has behind the same parent too."""

    tail: int = 0
    reserved: int = 0
    duplicate: int = 0


def waste_of(sequences: Iterable[Sequence], block_size: int) -> Waste:
    """O(sequences): sealed blocks are full and never kept twice."""
    tail = reserved = duplicate = 0
    open_blocks: defaultdict[object, list[list[int]]] = defaultdict(list)
    for sequence in sequences:
        num_begun = -(-sequence.num_computed_tokens // block_size)
        # A full hit holds its last block while it computes the last position again.
        reserved += max(0, len(sequence.block_table) - max(num_begun, sequence.num_sealed_blocks)) * block_size
        begins = sequence.num_computed_tokens // block_size * block_size
        num_open = sequence.num_computed_tokens - begins
        if not num_open or num_begun <= sequence.num_sealed_blocks:
            continue
        tail += block_size - num_open
        parent = sequence.block_table[num_begun - 2] if num_begun > 1 else None
        siblings = open_blocks[parent, sequence.extra_keys]
        tokens = sequence.token_ids[begins:begins + num_open]
        duplicate += max((_num_equal(tokens, others) for others in siblings), default=0)
        siblings.append(tokens)
    return Waste(tail, reserved, duplicate)


def _num_equal(ours: list[int], theirs: list[int]) -> int:
    """How many leading tokens both have in common."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
