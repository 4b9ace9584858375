"""A ForwardBatch as tensors: rows packed end to end, and where each row's K/V and logits go.

Owns the arithmetic from positions to rows and slots. Never touches KV storage or weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.model.forward_batch import ForwardBatch, SequenceRows


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first_row, first_row + num_rows) of the pack are positions [start, end) of one sequence."""

    first_row: int
    num_rows: int
    start: int
    end: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Tensors live on `device`. Rows from `num_rows` on are padding: no K/V, no output, token 0 at position 0.

    `write_rows` are the rows whose K/V are stored, at `write_slots`. `logits_rows` are the rows whose logits are
    wanted, `num_logits` of them, then repeats up to the row multiple. `opened_blocks` are blocks whose first slot is
    written in this pass and whose last is not: what they still hold is another's leftovers.
    """

    device: torch.device
    num_rows: int
    spans: tuple[RowSpan, ...]
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    write_rows: torch.Tensor
    write_slots: torch.Tensor
    logits_rows: torch.Tensor
    num_logits: int
    opened_blocks: torch.Tensor | None = None

    @classmethod
    def build(cls, batch: ForwardBatch, *, block_size: int, device: torch.device,
              row_multiple: int = 1) -> BatchLayout:
        """Pack the batch; row counts (logits rows too) are rounded up to `row_multiple`."""
        spans: list[RowSpan] = []
        positions, write_rows, write_slots, opened = [], [], [], []
        logits_rows: list[int] = []
        first_row = 0
        for rows in batch.sequences:
            span = _span_of(rows, first_row, block_size)
            position = np.arange(span.start, span.end)
            positions.append(position)
            written = position[max(0, rows.write_from - span.start):]
            write_rows.append(written - span.start + first_row)
            table = np.asarray(span.block_table, dtype=np.int64)
            write_slots.append(table[written // block_size] * block_size + written % block_size)
            logits_rows += range(first_row, first_row + rows.num_scored)
            if rows.wants_logits:
                logits_rows.append(first_row + span.num_rows - 1)
            if max(span.start, rows.write_from) <= span.end // block_size * block_size < span.end:
                opened.append(span.block_table[-1])
            spans.append(span)
            first_row += span.num_rows
        padding = -first_row % row_multiple
        tokens = [np.asarray(rows.token_ids, dtype=np.int64) for rows in batch.sequences]
        blank = np.zeros(padding, dtype=np.int64)

        def tensor(parts: list[np.ndarray]) -> torch.Tensor:
            joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
            return torch.from_numpy(joined.astype(np.int64, copy=False)).to(device)

        padded_logits = [*logits_rows, *logits_rows[:1] * (-len(logits_rows) % row_multiple)]
        return cls(device, first_row, tuple(spans),
                   token_ids=tensor([*tokens, blank]).unsqueeze(0),
                   position_ids=tensor([*positions, blank]).unsqueeze(0),
                   write_rows=tensor(write_rows), write_slots=tensor(write_slots),
                   logits_rows=torch.tensor(padded_logits, dtype=torch.int64, device=device),
                   num_logits=len(logits_rows),
                   opened_blocks=torch.tensor(opened, device=device) if opened else None)


def _span_of(rows: SequenceRows, first_row: int, block_size: int) -> RowSpan:
    num_rows = len(rows.token_ids)
    end = rows.start + num_rows
    num_blocks = -(-end // block_size)
    assert num_rows > 0, "a sequence without tokens has no place in a forward pass"
    assert rows.start >= 0
    assert len(rows.block_table) >= num_blocks, f"{len(rows.block_table)} blocks cannot hold {end} positions"
    return RowSpan(first_row, num_rows, rows.start, end, tuple(rows.block_table[:num_blocks]))
