"""Which decoding sequences are attended together, and what each group reads.

Sequences that begin with the same blocks are put together, and what all of them see of the common part is read once
for all of them; others join by how many blocks they see, padded with the blank block. Pure planning: touches no keys,
knows no requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from worker.model.batch_layout import RowSpan
from worker.model.kv_storage import Blocks, blocks_to_read

# Sequences share a gather while the shortest has at least this share of the longest's own blocks.
GROUP_LENGTH_RATIO = 0.75
# And so many positions of padding cost less than another group, whatever the ratio.
PADDING_POSITIONS_MIN = 64
# A common beginning shorter than this many positions is cheaper read by each for itself.
SHARED_POSITIONS_MIN = 64
_NOTHING = range(0)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one row each: `size` of them, at `rows` of the pack (None: the pack's rows, in order).

    `shared` are blocks that all of them have and see whole, or None; `own` are each one's own, all others that it
    sees anything of, padded to one width and end to end. `mask` [kv_heads * size, 1, own keys] is added to the scores
    of own keys. Where it is None, with a single sequence, all keys in `seen` of the own ones are seen and no others.
    """

    size: int
    rows: torch.Tensor | None
    shared: Blocks | None
    own: Blocks
    mask: torch.Tensor | None
    seen: slice


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
    for members, shared in _clusters(decoding, shape):
        for part in _similar_lengths(members, shared, shape):
            groups.append(_plan(part, shape, shared if len(part) > 1 else _NOTHING, device))
    whole = len(groups) == 1 and groups[0].size == num_rows
    if whole and [span.first_row for span in members] == list(range(num_rows)):
        return (replace(groups[0], rows=None),)
    return tuple(groups)


def first_block(start: int, window: int | None, block_size: int) -> int:
    """The first block that a row at position `start` can see."""
    return 0 if window is None else max(0, start + 1 - window) // block_size


def _clusters(spans: list[RowSpan], shape: GroupShape) -> list[tuple[list[RowSpan], range]]:
    """Those that share enough, each bunch with the blocks it shares (by index); all the others together."""
    by_beginning: defaultdict[int, list[RowSpan]] = defaultdict(list)
    for span in spans:
        by_beginning[span.block_table[0]].append(span)
    clusters, alone = [], []
    for bunch in by_beginning.values():
        sharing, shared = _sharing(bunch, shape)
        if shared:
            clusters.append((sharing, shared))
            bunch = [span for span in bunch if span not in sharing]
        alone += bunch
    alone.sort(key=lambda span: span.first_row)
    return [*clusters, (alone, _NOTHING)] if alone else clusters


def _sharing(bunch: list[RowSpan], shape: GroupShape) -> tuple[list[RowSpan], range]:
    """Of sequences with one beginning those that still see enough of it, and the blocks all of these see whole."""
    common = _num_common(bunch, shape.block_size)
    last_useful = common * shape.block_size - SHARED_POSITIONS_MIN
    near = [span for span in bunch if _first_seen(span, shape.window) <= last_useful]
    if len(near) < 2:
        return [], _NOTHING
    begin = -(-max(_first_seen(span, shape.window) for span in near) // shape.block_size)
    return near, range(begin, common)


def _num_common(members: list[RowSpan], block_size: int) -> int:
    """How many leading blocks all members have in common, full ones only."""
    first, common = members[0].block_table, min((span.end - 1) // block_size for span in members)
    for span in members[1:]:
        while span.block_table[:common] != first[:common]:
            common = next(index for index in range(common) if span.block_table[index] != first[index])
    return common


def _first_seen(span: RowSpan, window: int | None) -> int:
    return 0 if window is None else max(0, span.end - window)


def _own_blocks(span: RowSpan, shared: range, shape: GroupShape) -> list[int]:
    """By index in its table: what the sequence sees at least a position of, and does not share."""
    begin, end = first_block(span.start, shape.window, shape.block_size), len(span.block_table)
    return [*range(begin, shared.start), *range(shared.stop, end)] if shared else [*range(begin, end)]


def _similar_lengths(spans: list[RowSpan], shared: range, shape: GroupShape) -> list[list[RowSpan]]:
    """Runs whose members waste little on each other's padding, each in the pack's order."""
    groups: list[list[RowSpan]] = []
    longest = 0
    sizes = {span.first_row: len(_own_blocks(span, shared, shape)) for span in spans}
    for span in sorted(spans, key=lambda span: -sizes[span.first_row]):
        own = sizes[span.first_row]
        padding = (longest - own) * shape.block_size
        if groups and (own >= GROUP_LENGTH_RATIO * longest or padding <= PADDING_POSITIONS_MIN):
            groups[-1].append(span)
        else:
            groups.append([span])
            longest = own
    return [sorted(group, key=lambda span: span.first_row) for group in groups]


def _plan(members: list[RowSpan], shape: GroupShape, shared: range, device: torch.device) -> DecodeGroup:
    own = [_own_blocks(span, shared, shape) for span in members]
    width = max(map(len, own))
    ids = [block_id for span, indices in zip(members, own, strict=True)
           for block_id in (*(span.block_table[index] for index in indices),
                            *(shape.blank_block,) * (width - len(indices)))]
    lone = len(members) == 1
    shared_ids = members[0].block_table[shared.start:shared.stop]
    return DecodeGroup(
        size=len(members), rows=torch.tensor([span.first_row for span in members], device=device),
        shared=blocks_to_read(shared_ids, device) if shared_ids else None, own=blocks_to_read(ids, device),
        mask=None if lone else _mask(members, width, shared, shape).to(device),
        seen=_seen_by_one(members[0], shape) if lone else slice(None))


def _seen_by_one(span: RowSpan, shape: GroupShape) -> slice:
    """Which keys of its blocks, from the first it sees anything of, the sequence sees."""
    base = first_block(span.start, shape.window, shape.block_size) * shape.block_size
    return slice(_first_seen(span, shape.window) - base, span.end - base)


def _mask(members: list[RowSpan], width: int, shared: range, shape: GroupShape) -> torch.Tensor:
    """[kv_heads * members, 1, own keys]: 0 where a member sees a key, -inf elsewhere and where others are longer."""
    firsts = torch.tensor([first_block(span.start, shape.window, shape.block_size) for span in members])
    numbers = firsts.unsqueeze(1) + torch.arange(width)
    if shared:
        numbers += (numbers >= shared.start) * len(shared)
    positions = (numbers.unsqueeze(-1) * shape.block_size + torch.arange(shape.block_size)).flatten(1)
    ends = torch.tensor([span.end for span in members]).unsqueeze(1)
    hidden = positions >= ends
    if shape.window is not None:
        hidden |= positions < ends - shape.window
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
    return mask.unsqueeze(1).repeat(shape.num_kv_heads, 1, 1)
