"""Attention as fast as eager torch goes, right to rounding but not to the bit.

The GQA group is folded into rows everywhere: `enable_gqa` and repeated heads cost 9 to 19 times as much on CPU.
Sequences with one new row (decoding) are attended together (decode_groups.py); those with more rows one by one, in
tiles of queries small enough that little of what causality hides is computed. Window layers read their window's
blocks only. On CPU in 16 bits products by hand beat scaled_dot_product_attention by 1.6 to 5; elsewhere SDPA is used.
Blocks are zeroed when their first slot is written, so that what a gather reads beyond a sequence's end is finite.
Never promises equal bits for another batch or another cut: that is strict_attention's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.model.attention import AttentionCall
from worker.model.batch_layout import BatchLayout, RowSpan
from worker.model.decode_groups import DecodeGroup, GroupShape, first_block, plan_groups
from worker.model.kv_storage import Blocks, KVStorage, blocks_to_read

# Scores held at once by a query tile: 4 Mi elements are 8 MiB in bf16, a quarter of a common L3.
SCORES_MAX_ELEMENTS = 4 * 2**20
# On CPU a third of a 512-row prompt's scores lie beyond what causality shows; tiles of 128 compute an eighth of that.
QUERY_TILE_MAX = {"cpu": 128}
QUERY_TILE_MAX_ELSEWHERE = 512
QUERY_TILE_MIN = 32
# One row of several KV heads over few keys: SDPA takes the keys as they lie, and costs less before it begins.
SDPA_KEYS_MAX = 1024


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
    blocks: Blocks
    tiles: tuple[_QueryTile, ...]


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    """What a pass does in every layer that has this window."""

    groups: tuple[DecodeGroup, ...]
    prompts: tuple[_PromptPlan, ...]


@dataclass(slots=True)
class FastAttention:
    """One forward pass over `storage` in fast mode. Plans are made once per (window, heads) and pass."""

    layout: BatchLayout
    storage: KVStorage
    _plans: dict[tuple[int | None, int, int], _WindowPlan] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layout = self.layout
        if layout.opened_blocks is not None:
            self.storage.clear(call.layer, layout.opened_blocks)
        key, value = call.key, call.value
        if len(layout.write_rows) != layout.num_rows:   # rarely: most rows are new
            key, value = key[:, layout.write_rows], value[:, layout.write_rows]
        self.storage.write_heads(call.layer, layout.write_slots, key, value)
        plan = self._plan_for(call)
        if len(plan.groups) == 1 and plan.groups[0].rows is None:
            return self._attend_group(call, plan.groups[0])
        num_heads, num_rows, _ = call.query.shape
        out = call.query.new_empty(num_rows, num_heads, call.value.shape[-1])
        for group in plan.groups:
            assert group.rows is not None, "only a pass of one group leaves its rows out"
            out.index_copy_(0, group.rows, self._attend_group(call, group))
        for prompt in plan.prompts:
            self._attend_prompt(call, prompt, out)
        return out

    def _plan_for(self, call: AttentionCall) -> _WindowPlan:
        num_heads, num_kv_heads = call.query.shape[0], call.key.shape[0]
        plan = self._plans.get((call.window, num_heads, num_kv_heads))
        if plan is None:
            layout = self.layout
            shape = GroupShape(call.window, num_kv_heads, self.storage.block_size, self.storage.blank_block,
                               call.query.dtype)
            groups = plan_groups(layout.spans, shape, num_rows=layout.num_rows, device=layout.device)
            prompts = tuple(self._plan_prompt(span, call) for span in layout.spans if span.num_rows > 1)
            plan = self._plans[call.window, num_heads, num_kv_heads] = _WindowPlan(groups, prompts)
        return plan

    def _plan_prompt(self, span: RowSpan, call: AttentionCall) -> _PromptPlan:
        block_size, device = self.storage.block_size, self.layout.device
        first = first_block(span.start, call.window, block_size)
        num_scores = call.query.shape[0] * (span.end - first * block_size)
        tile_max = QUERY_TILE_MAX.get(device.type, QUERY_TILE_MAX_ELSEWHERE)
        tile_rows = min(tile_max, max(QUERY_TILE_MIN, SCORES_MAX_ELEMENTS // num_scores))
        tiles = tuple(_tile_of(span, (begin, tile_rows), call=call, key_start=first * block_size)
                      for begin in range(0, span.num_rows, tile_rows))
        return _PromptPlan(span, blocks_to_read(span.block_table[first:], device), tiles)

    def _attend_group(self, call: AttentionCall, group: DecodeGroup) -> torch.Tensor:
        """The rows of the group [size, heads, value_dim]."""
        keys, values = self.storage.gather_heads(call.layer, group.own, call.query.dtype)
        num_kv_heads, dim = len(keys), call.query.shape[-1]
        query = call.query if group.rows is None else call.query.index_select(1, group.rows)
        if group.mask is None:
            return _attention_of_one(call, query.reshape(num_kv_heads, -1, dim), keys[:, group.seen],
                                     values[:, group.seen])
        folded = query.reshape(num_kv_heads, -1, group.size, dim).transpose(1, 2).flatten(0, 1)
        keys, values = (each.reshape(len(folded), -1, each.shape[-1]) for each in (keys, values))
        if group.shared is None:
            result = _attention(call, folded, keys, values, mask=group.mask)
        else:
            shared = _end_to_end(*self.storage.gather_heads(call.layer, group.shared, call.query.dtype))
            result = _attention_of_two(call, folded, (keys, values), shared, mask=group.mask)
        return result.view(num_kv_heads, group.size, -1, result.shape[-1]).transpose(0, 1).flatten(1, 2)

    def _attend_prompt(self, call: AttentionCall, plan: _PromptPlan, out: torch.Tensor) -> None:
        keys, values = _end_to_end(*self.storage.gather_heads(call.layer, plan.blocks, call.query.dtype))
        num_heads, num_kv_heads = call.query.shape[0], keys.shape[0]
        for tile in plan.tiles:
            rows = slice(plan.span.first_row + tile.first, plan.span.first_row + tile.first + tile.count)
            folded = call.query[:, rows].reshape(num_kv_heads, num_heads // num_kv_heads * tile.count, -1)
            visible = slice(tile.key_begin, tile.key_end)
            result = _attention(call, folded, keys[:, visible], values[:, visible], mask=tile.mask.unsqueeze(0),
                                mask_from=tile.mask_from)
            out[rows] = result.view(num_heads, tile.count, -1).transpose(0, 1)


def _attention_of_one(call: AttentionCall, query: torch.Tensor, keys: torch.Tensor,
                      values: torch.Tensor) -> torch.Tensor:
    """[1, heads, value_dim] for one row's query [kv_heads, group, dim] over just the keys that it sees."""
    if keys.shape[1] <= SDPA_KEYS_MAX and len(keys) > 1 and call.softcap is None:
        result = scaled_dot_product_attention(query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0),
                                              scale=call.scaling)[0]
    else:
        result = _attention(call, query, *_end_to_end(keys, values), mask=None)
    return result.reshape(1, -1, values.shape[-1])


def _end_to_end(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As a product wants them: bmm copies slowly what seems to be cut out of something larger, be it one matrix."""
    if len(keys) == 1:
        return keys[0].unsqueeze(0), values[0].unsqueeze(0)
    return keys.contiguous(), values.contiguous()


def _by_hand(call: AttentionCall) -> bool:
    query = call.query
    return call.softcap is not None or (query.device.type == "cpu" and query.dtype != torch.float32)


def _attention(call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
               mask: torch.Tensor | None, mask_from: int = 0) -> torch.Tensor:
    """[n, folded rows, dim] over keys [n, keys, dim]; `mask` [n or 1, rows or 1, keys] is of keys `mask_from` on."""
    if not _by_hand(call):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (mask_from, 0)) if mask_from else mask
            mask = mask.unsqueeze(0)
        return scaled_dot_product_attention(query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0),
                                            attn_mask=mask, scale=call.scaling)[0]
    if call.softcap is None and mask_from == 0:    # one operator, and no slow path for a single product
        addend, beta = (query.new_empty(1, 1, 1), 0) if mask is None else (mask, 1)    # times 0: not even read
        scores = torch.baddbmm(addend.expand(len(query), query.shape[1], keys.shape[1]), query, keys.transpose(1, 2),
                               beta=beta, alpha=call.scaling)
    else:
        scores = _scores(call, query, keys)
        if mask is not None:
            scores[..., mask_from:] += mask
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def _attention_of_two(call: AttentionCall, query: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor],
                      shared: tuple[torch.Tensor, torch.Tensor], *, mask: torch.Tensor) -> torch.Tensor:
    """[kv_heads * n, group, dim] over the keys and values all n see [kv_heads, keys, dim], then each one's own."""
    num_kv_heads, num_shared, _ = shared[0].shape
    together = query.reshape(num_kv_heads, -1, query.shape[-1])
    scores_shared = _scores(call, together, shared[0])
    scores_own = _scores(call, query, own[0]).add_(mask)
    scores = torch.cat((scores_shared.view(*query.shape[:2], -1), scores_own), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    from_shared = torch.bmm(weights[..., :num_shared].view(*together.shape[:2], -1), shared[1])
    return torch.bmm(weights[..., num_shared:], own[1]).add_(from_shared.view(*query.shape[:2], -1))


def _scores(call: AttentionCall, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    scores = torch.bmm(query * call.scaling, keys.transpose(1, 2))
    return scores if call.softcap is None else scores.div_(call.softcap).tanh_().mul_(call.softcap)


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
