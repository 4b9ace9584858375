"""Runs steps of many rows of a compact decoder in compiled code: prompts, and what decodes beside them.

Shares weights, threads and the view of the storage with the decoder of few rows; owns buffers only. Never used in
strict mode. Equal to the compact decoder up to rounding: sums and residuals are float32 here.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from worker.model.batch_layout import BatchLayout, RowSpan
from worker.model.compiled.decoder import CompiledDecoder, padded, zeros
from worker.model.compiled.machine import PANEL
from worker.model.compiled.packing import CHUNK
from worker.model.compiled.prompt_attention import tile_rows
from worker.model.compiled.prompt_step import ROWS_MAX, PromptRoom, Prompts, compute
from worker.model.compiled.step import Decoder, Team
from worker.model.compiled.team import MANY_ROWS
from worker.model.forward_batch import ForwardBatch
from worker.model.kv_storage import KVStorage

# Beyond so many positions of decoding sequences torch reads what they have in common faster: once for all of them.
DECODED_POSITIONS_MAX = 64 * 1024
ROWS_GROWTH = 64    # room for a step grows by so many rows


class CompiledPrompts:
    """`logits` for what `takes` says yes to. One step at a time, and none of `decoder`'s meanwhile."""

    def __init__(self, decoder: CompiledDecoder) -> None:
        self._decoder = decoder
        self.vocab_size = decoder.vocab_size
        self._rooms: tuple[PromptRoom, int, int] | None = None
        self._group = decoder.shape.num_heads // decoder.shape.num_kv_heads

    def takes(self, batch: ForwardBatch, storage: KVStorage) -> bool:
        """Anything but adapters and sums of hidden states."""
        sequences = batch.sequences
        if not self._decoder.reads(storage):
            return False
        if sum(rows.start for rows in sequences if len(rows.token_ids) == 1) >= DECODED_POSITIONS_MAX:
            return False
        return not any(rows.pools or rows.adapter is not None for rows in sequences)

    def logits(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """float32 [rows whose logits are wanted, vocab], after every layer's K/V were written."""
        layout = BatchLayout.build(batch, block_size=storage.block_size, device=torch.device("cpu"))
        fixed = self._decoder.decoder_over(storage)
        logits = torch.empty(layout.num_logits, fixed.head_panels * PANEL)
        prompts = self._prompts(layout, fixed, logits)
        room = self._room(layout.num_rows, layout.num_logits)
        team = Team(*self._decoder.team.for_step(MANY_ROWS))
        self._decoder.team.run(partial(_compute, team, fixed, (prompts, room)), MANY_ROWS)
        return logits[:, :self.vocab_size]

    def _prompts(self, layout: BatchLayout, fixed: Decoder, logits: torch.Tensor) -> Prompts:
        compact, size = self._decoder.compact, fixed.block_size
        hidden = compact.embedded(layout.token_ids[0]).float()
        turns = torch.stack([torch.stack(rope(hidden, layout.position_ids)) for rope in compact.ropes])[:, :, 0]
        slots = np.full(layout.num_rows, -1, dtype=np.int64)
        slots[layout.write_rows.numpy()] = layout.write_slots.numpy()
        tables = np.zeros((len(layout.spans), max(len(span.block_table) for span in layout.spans)), dtype=np.int64)
        behind = np.zeros(layout.num_rows, dtype=np.int64)
        opened = set() if layout.opened_blocks is None else set(layout.opened_blocks.tolist())
        tiles = []
        for index, span in enumerate(layout.spans):
            tables[index, :len(span.block_table)] = span.block_table
            if span.block_table[-1] in opened:
                behind[span.first_row + span.num_rows - 1] = -span.end % size
            tiles += self._tiles(span, index)
        return Prompts(hidden.numpy(), layout.position_ids[0].numpy(), slots, behind, turns.contiguous().numpy(),
                       np.array(sorted(tiles, reverse=True))[:, 1:], tables,
                       np.zeros(len(fixed.products), dtype=np.int32), layout.logits_rows.numpy(), logits.numpy())

    def _tiles(self, span: RowSpan, sequence: int) -> list[tuple[int, int, int, int]]:
        """(how much it has to read, sequence, first row, rows) of each tile: the dearest are begun first."""
        most = tile_rows(self._group)
        return [((span.start + first) * (count := min(most, span.num_rows - first)), sequence,
                 span.first_row + first, count) for first in range(0, span.num_rows, most)]

    def _room(self, num_rows: int, num_wanted: int) -> PromptRoom:
        """Buffers for so many rows; the team's are made anew when a larger step comes along."""
        if self._rooms is None or self._rooms[1] < num_rows or self._rooms[2] < num_wanted:
            rows, wanted = (-(-count // ROWS_GROWTH) * ROWS_GROWTH for count in (num_rows, max(num_wanted, 1)))
            if self._rooms is not None:
                rows, wanted = max(rows, self._rooms[1]), max(wanted, self._rooms[2])
            self._rooms = self._made_room(rows, wanted), rows, wanted
        return self._rooms[0]

    def _made_room(self, rows: int, wanted: int) -> PromptRoom:
        shape, size = self._decoder.shape, self._decoder.team.size
        heads, folded, half = shape.num_heads * shape.head_dim, tile_rows(self._group) * self._group, np.uint16
        return PromptRoom(
            queries=zeros(rows, heads, dtype=half), attended=zeros(rows, heads, dtype=half),
            last_hidden=zeros(wanted, shape.hidden), last_attended=zeros(wanted, heads, dtype=half),
            last_normed=zeros(wanted, shape.hidden, dtype=half),
            normed=zeros(size, ROWS_MAX, shape.hidden, dtype=half), mixed=zeros(size, ROWS_MAX, padded(shape.mixed)),
            added=zeros(size, ROWS_MAX, padded(shape.hidden)), gated=zeros(size, ROWS_MAX, shape.inner, dtype=half),
            panels=zeros(size, 2, ROWS_MAX, PANEL), turned=zeros(size, shape.head_dim, dtype=half),
            keys=zeros(size, CHUNK * shape.head_dim, dtype=half),
            values=zeros(size, CHUNK * padded(shape.head_dim), dtype=half),
            scores=zeros(size, folded, CHUNK), weights=zeros(size, folded, CHUNK, dtype=half),
            sums=zeros(size, folded, padded(shape.head_dim)), summands=zeros(size, folded, padded(shape.head_dim)),
            seen=zeros(size, folded, 2))


def _compute(team: Team, decoder: Decoder, work: tuple[Prompts, PromptRoom], thread: int) -> None:
    compute(thread, team, decoder, work)
