"""Which decoding sequences are attended together, and what each group reads.

Sequences that begin with the same blocks are put together and their common part is read once for all of them; others
join by similar length, padded with the blank block. Pure planning: touches no keys, knows no requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.model.batch_layout import RowSpan

# Sequences share a gather while the shortest has at least this share of the longest's own blocks.
GROUP_LENGTH_RATIO = 0.75
# A common beginning shorter than this many positions is cheaper read by each for itself.
SHARED_POSITIONS_MIN = 64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one row each: `size` of them, at `rows` of the pack (None: the pack's rows, in order).

    `shared_ids` are the blocks they all begin with, or None; `block_ids` [size * width] are each one's own blocks
    after those. `mask` [kv_heads * size, 1, own keys] is added to the scores of own keys. Every position of the
    shared blocks is seen by every sequence.
    """

    size: int
    rows: torch.Tensor | None
    shared_ids: torch.Tensor | None
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a plan needs to know of layer and storage."""

    window: int | None
    num_kv_heads: int
    block_size: int
    blank_block: int
    dtype: torch.dtype


def plan_groups(spans: Sequence[RowSpan], shape: GroupShape, *, num_rows: int,
                device: torch.device) -> tuple[DecodeGroup, ...]:
    """Groups for `spans`, each one row of a pack of `num_rows`."""
    decoding = [span for span in spans if span.num_rows == 1]
    groups = []
    for members in _clusters(decoding, shape):
        num_shared = _num_shared(members, shape)
        for part in _similar_lengths(members, num_shared):
            groups.append(_plan(part, shape, num_shared if len(part) > 1 else 0, device))
    whole = len(groups) == 1 and groups[0].size == num_rows
    if whole and [span.first_row for span in members] == list(range(num_rows)):
        only = groups[0]
        return (DecodeGroup(only.size, None, only.shared_ids, only.block_ids, only.mask),)
    return tuple(groups)


def first_block(start: int, window: int | None, block_size: int) -> int:
    """The first block that a row at position `start` can see."""
    return 0 if window is None else max(0, start + 1 - window) // block_size


def _clusters(spans: list[RowSpan], shape: GroupShape) -> list[list[RowSpan]]:
    """Those that share a long enough beginning, each bunch by itself; all the others together."""
    if shape.window is not None or len(spans) < 2:
        return [spans] if spans else []
    by_beginning: defaultdict[int, list[RowSpan]] = defaultdict(list)
    for span in spans:
        by_beginning[span.block_table[0]].append(span)
    sharing = [members for members in by_beginning.values() if len(members) > 1 and _num_shared(members, shape)]
    taken = {members[0].block_table[0] for members in sharing}
    alone = [span for span in spans if span.block_table[0] not in taken]
    return [*sharing, alone] if alone else sharing


def _num_shared(members: list[RowSpan], shape: GroupShape) -> int:
    """How many leading blocks all members have in common, full ones only; 0 when it is not worth the while."""
    if shape.window is not None or len(members) < 2:
        return 0
    limit = min((span.end - 1) // shape.block_size for span in members)
    first = members[0].block_table
    shared = limit
    for span in members[1:]:
        while span.block_table[:shared] != first[:shared]:
            shared = next(index for index in range(shared)
                          if span.block_table[index] != first[index])
    return shared if shared * shape.block_size >= SHARED_POSITIONS_MIN else 0


def _similar_lengths(spans: list[RowSpan], num_shared: int) -> list[list[RowSpan]]:
    """Runs whose members waste little on each other's padding, each in the pack's order."""
    groups: list[list[RowSpan]] = []
    for span in sorted(spans, key=lambda span: -span.end):
        own = len(span.block_table) - num_shared
        if groups and own >= GROUP_LENGTH_RATIO * (len(groups[-1][0].block_table) - num_shared):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [sorted(group, key=lambda span: span.first_row) for group in groups]


def _plan(members: list[RowSpan], shape: GroupShape, num_shared: int, device: torch.device) -> DecodeGroup:
    block_size = shape.block_size
    firsts = [num_shared or first_block(span.start, shape.window, block_size) for span in members]
    width = max(len(span.block_table) - first for span, first in zip(members, firsts, strict=True))
    tables = [[*span.block_table[first:], *[shape.blank_block] * (width - len(span.block_table) + first)]
              for span, first in zip(members, firsts, strict=True)]
    positions = torch.tensor(firsts).unsqueeze(1) * block_size + torch.arange(width * block_size)
    ends = torch.tensor([span.end for span in members]).unsqueeze(1)
    hidden = positions >= ends
    if shape.window is not None:
        hidden |= positions < ends - shape.window
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
    return DecodeGroup(
        size=len(members), rows=torch.tensor([span.first_row for span in members], device=device),
        shared_ids=torch.tensor(members[0].block_table[:num_shared], device=device) if num_shared else None,
        block_ids=torch.tensor(tables, device=device).flatten(),
        mask=mask.unsqueeze(1).repeat(shape.num_kv_heads, 1, 1).to(device))
