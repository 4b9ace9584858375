"""Attention whose bits depend on a row's own past alone: not on cuts, chunks, cache hits or neighbours.

Every matrix product sees shapes for which a row's result was found not to depend on the rest of the matrix: rows in
multiples of ROW_MULTIPLE (the GQA group folded into them), keys in tiles of KEY_TILE anchored at multiples of it in
absolute position, and a sum over keys that runs tile by tile in order, so that a tile the row cannot see adds exact
zeros. What lies beyond a sequence's end is zeroed before it is multiplied.
Never faster at the price of that. fp32 only. Known approximation: that shapes of the same kind give the same bits is
a property of this machine's BLAS, not a theorem; exactness_probe asks it at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from worker.model.attention import AttentionCall
from worker.model.batch_layout import BatchLayout, RowSpan
from worker.model.kv_storage import KVStorage

ROW_MULTIPLE = 16
KEY_TILE = 512
# Query positions attended at once. It bounds the scores' memory and skips keys that no row of the tile sees.
QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Some rows of a span and the keys they may see.

    `first` and `count` are relative to the span; keys are positions [key_start, key_end), multiples of KEY_TILE.
    `mask` [folded rows, keys from `mask_from` on] is added to the scores: 0 where a row sees a key, -inf elsewhere.
    """

    first: int
    count: int
    key_start: int
    key_end: int
    mask_from: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _SpanPlan:
    """A span's tiles for one window. `block_ids` are its blocks from position `key_start`, padded with the blank one.

    `num_keys` of the gathered positions are real; what the last block holds beyond them is another's leftovers.
    """

    span: RowSpan
    key_start: int
    num_keys: int
    block_ids: torch.Tensor
    tiles: tuple[_QueryTile, ...]


@dataclass(slots=True)
class StrictAttention:
    """One forward pass over `storage` in strict mode. Plans are made once per (window, GQA group) and pass."""

    layout: BatchLayout
    storage: KVStorage
    _plans: dict[tuple[int | None, int], list[_SpanPlan]] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layout = self.layout
        key, value = call.key.transpose(0, 1), call.value.transpose(0, 1)
        self.storage.write(call.layer, layout.write_slots, key[layout.write_rows], value[layout.write_rows])
        num_heads, num_rows, _ = call.query.shape
        out = call.query.new_zeros(num_rows, num_heads, call.value.shape[-1])
        group = num_heads // call.key.shape[0]
        for plan in self._plans_for(call.window, group):
            self._attend_span(call, plan, out)
        return out

    def _plans_for(self, window: int | None, group: int) -> list[_SpanPlan]:
        plans = self._plans.get((window, group))
        if plans is None:
            plans = [self._plan_span(span, window, group) for span in self.layout.spans]
            self._plans[window, group] = plans
        return plans

    def _plan_span(self, span: RowSpan, window: int | None, group: int) -> _SpanPlan:
        device, block_size = self.layout.device, self.storage.block_size
        tiles = tuple(_tile_of(span, first, window, group=group, device=device)
                      for first in range(0, span.num_rows, QUERY_TILE))
        key_start, key_end = tiles[0].key_start, tiles[-1].key_end
        ids = span.block_table[key_start // block_size:]
        blanks = (key_end - key_start) // block_size - len(ids)
        block_ids = torch.tensor([*ids, *[self.storage.blank_block] * blanks], dtype=torch.int64, device=device)
        return _SpanPlan(span, key_start, span.end - key_start, block_ids, tiles)

    def _attend_span(self, call: AttentionCall, plan: _SpanPlan, out: torch.Tensor) -> None:
        keys, values = self.storage.gather(call.layer, plan.block_ids, call.query.dtype)
        # Zero times another sequence's leftovers must be zero, also when they are not finite.
        last_block_end = -(-plan.num_keys // self.storage.block_size) * self.storage.block_size
        keys[plan.num_keys:last_block_end].zero_()
        values[plan.num_keys:last_block_end].zero_()
        for tile in plan.tiles:
            first_row = plan.span.first_row + tile.first
            begin, end = tile.key_start - plan.key_start, tile.key_end - plan.key_start
            out[first_row:first_row + tile.count] = _attend_tile(
                call, tile, call.query[:, first_row:first_row + tile.count],
                keys=keys[begin:end], values=values[begin:end])


def _tile_of(span: RowSpan, first: int, window: int | None, *, group: int, device: torch.device) -> _QueryTile:
    """The tile of up to QUERY_TILE rows from the span's row `first` on."""
    count = min(QUERY_TILE, span.num_rows - first)
    start = span.start + first
    end = start + count
    seen_from = 0 if window is None else max(0, start + 1 - window)
    key_start = seen_from // KEY_TILE * KEY_TILE
    key_end = -(-end // KEY_TILE) * KEY_TILE
    # With no window every row of the tile sees all keys before the tile's first position.
    mask_from = start // KEY_TILE * KEY_TILE - key_start if window is None else 0
    rows = torch.arange(start, end, device=device).unsqueeze(1)
    columns = torch.arange(key_start + mask_from, key_end, device=device)
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf).repeat(group, 1)
    padding = -mask.shape[0] % ROW_MULTIPLE
    mask = torch.nn.functional.pad(mask, (0, 0, 0, padding))
    return _QueryTile(first, count, key_start, key_end, mask_from, mask)


def _attend_tile(call: AttentionCall, tile: _QueryTile, query: torch.Tensor, *, keys: torch.Tensor,
                 values: torch.Tensor) -> torch.Tensor:
    """Outputs [count, heads, value_dim] of `query` [heads, count, dim] over keys [n * KEY_TILE, kv_heads, dim]."""
    num_heads, count, _ = query.shape
    num_kv_heads = keys.shape[1]
    num_folded = num_heads // num_kv_heads * count
    folded = query.reshape(num_kv_heads, num_folded, -1) * call.scaling
    folded = torch.nn.functional.pad(folded, (0, 0, 0, -num_folded % ROW_MULTIPLE))
    scores = torch.bmm(folded, keys.permute(1, 2, 0))
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    scores[:, :, tile.mask_from:] += tile.mask
    weights = torch.softmax(scores, dim=-1)
    by_head = values.transpose(0, 1)
    out = torch.bmm(weights[:, :, :KEY_TILE], by_head[:, :KEY_TILE])
    for begin in range(KEY_TILE, keys.shape[0], KEY_TILE):
        out.baddbmm_(weights[:, :, begin:begin + KEY_TILE], by_head[:, begin:begin + KEY_TILE])
    return out[:, :num_folded].reshape(num_heads, count, -1).transpose(0, 1)
