"""From positions to rows and slots, against the definition written out one position at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.model.batch_layout import BatchLayout
from worker.model.forward_batch import ForwardBatch, SequenceRows

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> tuple[ForwardBatch, int]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        start, length = draw(st.integers(0, 50)), draw(st.integers(1, 40))
        num_blocks = -(-(start + length) // block_size) + draw(st.integers(0, 2))
        table = draw(st.permutations(range(100))) if num_blocks < 100 else range(num_blocks)
        sequences.append(SequenceRows(
            token_ids=draw(st.lists(st.integers(0, 999), min_size=length, max_size=length)), start=start,
            block_table=list(table)[:num_blocks], write_from=draw(st.integers(0, start + length + 5)),
            wants_logits=draw(st.booleans())))
    return ForwardBatch(tuple(sequences)), block_size


@given(batches(), st.sampled_from([1, 16]))
def test_rows_positions_slots_and_logits(case: tuple[ForwardBatch, int], multiple: int) -> None:
    batch, block_size = case
    tokens, positions, written, logits_rows = [], [], [], []
    for rows in batch.sequences:
        for offset, token in enumerate(rows.token_ids):
            position = rows.start + offset
            if position >= rows.write_from:
                slot = rows.block_table[position // block_size] * block_size + position % block_size
                written.append((len(tokens), slot))
            tokens.append(token)
            positions.append(position)
        if rows.wants_logits:
            logits_rows.append(len(tokens) - 1)
    layout = BatchLayout.build(batch, block_size=block_size, device=CPU, row_multiple=multiple)
    padding = [0] * (-len(tokens) % multiple)
    assert layout.token_ids.tolist() == [tokens + padding]
    assert layout.position_ids.tolist() == [positions + padding]
    assert list(zip(layout.write_rows.tolist(), layout.write_slots.tolist(), strict=True)) == written
    assert layout.num_rows == len(tokens)
    assert layout.logits_rows.tolist()[:layout.num_logits] == logits_rows
    assert len(layout.logits_rows) % multiple == 0
    assert set(layout.logits_rows.tolist()) <= set(logits_rows)


@pytest.mark.parametrize("rows", [
    SequenceRows([], 0, [0], 0, True),
    SequenceRows([1], -1, [0], 0, True),
    SequenceRows([1] * 17, 0, [0], 0, True),
    SequenceRows([1], 16, [0], 16, True),
])
def test_what_the_scheduler_must_never_ask(rows: SequenceRows) -> None:
    with pytest.raises(AssertionError):
        BatchLayout.build(ForwardBatch((rows,)), block_size=16, device=CPU)
