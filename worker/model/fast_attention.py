"""Attention as fast as eager torch goes: right to rounding, not to the bit.

The GQA group is folded into rows everywhere: `enable_gqa` and repeated heads cost 9 to 19 times as much on CPU.
Sequences with one new row (decoding) are attended together, in groups of similar length, their tables padded with the
blank block; sequences with more rows one by one, in tiles of queries. Window layers read their window's blocks only.
On CPU in 16 bits products by hand beat scaled_dot_product_attention by 1.6 to 2; elsewhere SDPA is used.
Never promises equal bits for another batch or another cut: that is strict_attention's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.model.attention import AttentionCall
from worker.model.batch_layout import BatchLayout, RowSpan
from worker.model.kv_storage import KVStorage

# Scores held at once by a query tile: 4 Mi elements are 8 MiB in bf16, a quarter of a common L3.
SCORES_MAX_ELEMENTS = 4 * 2**20
QUERY_TILE_MAX = 512
QUERY_TILE_MIN = 32
# Decoding sequences share a gather while the shortest has at least this share of the longest's blocks.
GROUP_LENGTH_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one row each. `block_ids` [sequences * blocks]; `mask` [sequences, 1, 1, keys] is additive.

    `stale_slots` index the gathered positions that lie in a sequence's last block but beyond its end.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    stale_slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Rows [first, first + count) of a span, seeing gathered keys [key_begin, key_end).

    `mask` [folded rows, keys from `mask_from` on] is added to the scores; before it every row sees every key.
    """

    first: int
    count: int
    key_begin: int
    key_end: int
    mask_from: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _PromptPlan:
    """A span with several rows. Its blocks from the first one any row sees, and its query tiles."""

    span: RowSpan
    block_ids: torch.Tensor
    tiles: tuple[_QueryTile, ...]


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    """What a pass does in every layer that has this window."""

    groups: tuple[_DecodeGroup, ...]
    prompts: tuple[_PromptPlan, ...]


@dataclass(slots=True)
class FastAttention:
    """One forward pass over `storage` in fast mode. Plans are made once per (window, GQA group) and pass."""

    layout: BatchLayout
    storage: KVStorage
    _plans: dict[tuple[int | None, int], _WindowPlan] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layout = self.layout
        key, value = call.key.transpose(0, 1), call.value.transpose(0, 1)
        if len(layout.write_rows) == layout.num_rows:   # the usual case: every row is new
            self.storage.write(call.layer, layout.write_slots, key, value)
        else:
            self.storage.write(call.layer, layout.write_slots, key[layout.write_rows], value[layout.write_rows])
        num_heads, num_rows, _ = call.query.shape
        out = call.query.new_empty(num_rows, num_heads, call.value.shape[-1])
        plan = self._plan_for(call)
        for group in plan.groups:
            self._attend_group(call, group, out)
        for prompt in plan.prompts:
            self._attend_prompt(call, prompt, out)
        return out

    def _plan_for(self, call: AttentionCall) -> _WindowPlan:
        group = call.query.shape[0] // call.key.shape[0]
        plan = self._plans.get((call.window, group))
        if plan is None:
            spans = self.layout.spans
            decoding = sorted((span for span in spans if span.num_rows == 1), key=lambda span: -span.end)
            groups = tuple(self._plan_group(members, call) for members in _similar_lengths(decoding))
            prompts = tuple(self._plan_prompt(span, call) for span in spans if span.num_rows > 1)
            plan = self._plans[call.window, group] = _WindowPlan(groups, prompts)
        return plan

    def _plan_group(self, members: list[RowSpan], call: AttentionCall) -> _DecodeGroup:
        block_size, device = self.storage.block_size, self.layout.device
        first_blocks = [_first_block(span, call.window, block_size) for span in members]
        width = max(len(span.block_table) - first for span, first in zip(members, first_blocks, strict=True))
        tables = [[*span.block_table[first:], *[self.storage.blank_block] * (width - len(span.block_table) + first)]
                  for span, first in zip(members, first_blocks, strict=True)]
        key_starts = torch.tensor(first_blocks, device=device).unsqueeze(1) * block_size
        positions = key_starts + torch.arange(width * block_size, device=device)
        ends = torch.tensor([span.end for span in members], device=device).unsqueeze(1)
        hidden = positions >= ends
        stale = hidden & (positions < (ends + block_size - 1) // block_size * block_size)
        if call.window is not None:
            hidden = hidden | (positions < ends - call.window)
        mask = torch.zeros(hidden.shape, dtype=call.query.dtype, device=device).masked_fill_(hidden, -torch.inf)
        return _DecodeGroup(rows=torch.tensor([span.first_row for span in members], device=device),
                            block_ids=torch.tensor(tables, device=device).flatten(),
                            stale_slots=stale.flatten().nonzero().squeeze(1),
                            mask=mask[:, None, None, :])

    def _plan_prompt(self, span: RowSpan, call: AttentionCall) -> _PromptPlan:
        block_size, device = self.storage.block_size, self.layout.device
        first_block = _first_block(span, call.window, block_size)
        num_scores = call.query.shape[0] * (span.end - first_block * block_size)
        tile_rows = min(QUERY_TILE_MAX, max(QUERY_TILE_MIN, SCORES_MAX_ELEMENTS // num_scores))
        tiles = tuple(_tile_of(span, (first, tile_rows), call=call, key_start=first_block * block_size)
                      for first in range(0, span.num_rows, tile_rows))
        return _PromptPlan(span, torch.tensor(span.block_table[first_block:], device=device), tiles)

    def _attend_group(self, call: AttentionCall, group: _DecodeGroup, out: torch.Tensor) -> None:
        keys, values = self.storage.gather(call.layer, group.block_ids, call.query.dtype)
        # A masked key still meets a weight of zero, and zero times a leftover that is not finite is NaN.
        keys.index_fill_(0, group.stale_slots, 0)
        values.index_fill_(0, group.stale_slots, 0)
        size, num_kv_heads = len(group.rows), keys.shape[1]
        query = call.query.index_select(1, group.rows).transpose(0, 1)
        folded = query.reshape(size, num_kv_heads, -1, query.shape[-1])
        result = _attention(call, folded, keys.view(size, -1, *keys.shape[1:]).transpose(1, 2),
                            values.view(size, -1, *values.shape[1:]).transpose(1, 2), mask=group.mask, mask_from=0)
        out.index_copy_(0, group.rows, result.reshape(size, -1, result.shape[-1]))

    def _attend_prompt(self, call: AttentionCall, plan: _PromptPlan, out: torch.Tensor) -> None:
        keys, values = self.storage.gather(call.layer, plan.block_ids, call.query.dtype)
        keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        num_heads, num_kv_heads = call.query.shape[0], keys.shape[1]
        group = num_heads // num_kv_heads
        for tile in plan.tiles:
            rows = slice(plan.span.first_row + tile.first, plan.span.first_row + tile.first + tile.count)
            folded = call.query[:, rows].reshape(1, num_kv_heads, group * tile.count, -1)
            visible = slice(tile.key_begin, tile.key_end)
            result = _attention(call, folded, keys[:, :, visible], values[:, :, visible],
                                mask=tile.mask, mask_from=tile.mask_from)
            out[rows] = result.view(num_heads, tile.count, -1).transpose(0, 1)


def _attention(call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
               mask: torch.Tensor, mask_from: int) -> torch.Tensor:
    """[n, kv_heads, folded rows, dim] over keys [n, kv_heads, keys, dim]; `mask` covers keys from `mask_from` on."""
    by_hand = call.softcap is not None or (query.device.type == "cpu" and query.dtype != torch.float32)
    if not by_hand:
        full_mask = torch.nn.functional.pad(mask, (mask_from, 0)) if mask_from else mask
        return scaled_dot_product_attention(query, keys, values, attn_mask=full_mask, scale=call.scaling)
    scores = torch.matmul(query * call.scaling, keys.transpose(-1, -2))
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    scores[..., mask_from:] += mask
    return torch.matmul(torch.softmax(scores, dim=-1), values)


def _tile_of(span: RowSpan, rows: tuple[int, int], *, call: AttentionCall, key_start: int) -> _QueryTile:
    """Up to rows[1] rows of the span from its row rows[0] on; gathered keys begin at position `key_start`."""
    first, count = rows[0], min(rows[1], span.num_rows - rows[0])
    start, window, device = span.start + first, call.window, call.query.device
    key_begin = 0 if window is None else max(0, start + 1 - window) - key_start
    key_end = start + count - key_start
    mask_from = start - key_start if window is None else 0
    positions = torch.arange(start, start + count, device=device).unsqueeze(1)
    columns = torch.arange(key_start + key_begin + mask_from, start + count, device=device)
    hidden = columns > positions
    if window is not None:
        hidden |= columns <= positions - window
    mask = torch.zeros(hidden.shape, dtype=call.query.dtype, device=device).masked_fill_(hidden, -torch.inf)
    group = call.query.shape[0] // call.key.shape[0]
    return _QueryTile(first, count, key_begin, key_end, mask_from, mask.repeat(group, 1))


def _first_block(span: RowSpan, window: int | None, block_size: int) -> int:
    """The first block that the span's first row can see."""
    return 0 if window is None else max(0, span.start + 1 - window) // block_size


def _similar_lengths(spans: list[RowSpan]) -> list[list[RowSpan]]:
    """Cut a list that falls in length into runs whose members waste little on each other's padding."""
    groups: list[list[RowSpan]] = []
    for span in spans:
        if groups and len(span.block_table) >= GROUP_LENGTH_RATIO * len(groups[-1][0].block_table):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups
