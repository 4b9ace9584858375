"""Groups of decoding sequences: every row once, every position a row may see read once, nothing else unmasked."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.model.batch_layout import RowSpan
from worker.model.decode_groups import DecodeGroup, GroupShape, plan_groups
from worker.model.kv_storage import Blocks

BLOCK_SIZE = 16
BLANK = 10_000
CPU = torch.device("cpu")


def shape(window: int | None = None, num_kv_heads: int = 1) -> GroupShape:
    return GroupShape(window, num_kv_heads, BLOCK_SIZE, BLANK, torch.float32)


def spans_of(lengths: list[tuple[int, int]], *, shared_blocks: int = 8) -> list[RowSpan]:
    """One decoding span per (family, positions): those of a family begin with the same `shared_blocks` blocks."""
    spans = []
    for row, (family, end) in enumerate(lengths):
        num_blocks = -(-end // BLOCK_SIZE)
        common = [family * 100 + index for index in range(min(shared_blocks, num_blocks))]
        own = [1000 + row * 100 + index for index in range(num_blocks - len(common))]
        spans.append(RowSpan(row, 1, end - 1, end, tuple(common + own)))
    return spans


def ids_of(blocks: Blocks | None) -> list[int]:
    if blocks is None:
        return []
    return list(range(blocks.start, blocks.stop)) if isinstance(blocks, slice) else blocks.tolist()


def seen_by(group: DecodeGroup, member: int) -> list[tuple[int, int]]:
    """(block, slot) of every key that the group's member attends to, sorted."""
    own = ids_of(group.own)
    width = len(own) // group.size
    keys = [(block, slot) for block in own[member * width:(member + 1) * width] for slot in range(BLOCK_SIZE)]
    shared = [(block, slot) for block in ids_of(group.shared) for slot in range(BLOCK_SIZE)]
    if group.mask is None:
        return sorted(shared + keys[group.seen])
    visible = (group.mask[member, 0] == 0).tolist()
    return sorted(shared + [key for key, sees in zip(keys, visible, strict=True) if sees])


def expected_keys(span: RowSpan, window: int | None) -> list[tuple[int, int]]:
    begin = 0 if window is None else max(0, span.end - window)
    return sorted((span.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                  for position in range(begin, span.end))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), min_size=1, max_size=9),
       st.sampled_from([None, None, 5, 32, 100, 150]), st.integers(0, 24), st.integers(1, 2))
def test_every_row_sees_exactly_its_past(lengths: list[tuple[int, int]], window: int | None, shared: int,
                                         num_kv_heads: int) -> None:
    spans = spans_of(lengths, shared_blocks=shared)
    groups = plan_groups(spans, shape(window, num_kv_heads), num_rows=len(spans), device=CPU)
    rows: list[int] = []
    for group in groups:
        members = list(range(len(spans))) if group.rows is None else group.rows.tolist()
        assert len(members) == group.size
        rows += members
        for index, row in enumerate(members):
            assert seen_by(group, index) == expected_keys(spans[row], window)
    assert sorted(rows) == list(range(len(spans)))


def test_a_common_beginning_is_read_once() -> None:
    spans = spans_of([(0, 200)] * 4 + [(1, 190)])
    groups = plan_groups(spans, shape(), num_rows=5, device=CPU)
    shared = [group for group in groups if group.shared is not None]
    assert [group.size for group in shared] == [4]
    assert ids_of(shared[0].shared) == list(range(8))
    assert len(ids_of(shared[0].own)) == 4 * 5


def test_a_window_shares_what_all_its_members_see_whole() -> None:
    """Rows at 199, 203 and 210 see from 100, 104 and 111 on: of the common twelve blocks, 7 to 11 whole."""
    spans = spans_of([(0, 200), (0, 204), (0, 211), (1, 200)], shared_blocks=12)
    groups = plan_groups(spans, shape(100), num_rows=4, device=CPU)
    (sharing,) = [group for group in groups if group.shared is not None]
    assert ids_of(sharing.shared) == [7, 8, 9, 10, 11]
    assert sharing.rows is not None
    assert sharing.rows.tolist() == [0, 1, 2]


def test_who_has_left_the_common_part_behind_does_not_hold_the_others_back() -> None:
    spans = spans_of([(0, 200), (0, 204), (0, 700)], shared_blocks=12)
    groups = plan_groups(spans, shape(100), num_rows=3, device=CPU)
    assert [group.size for group in groups if group.shared is not None] == [2]


def test_the_block_that_is_being_written_is_never_shared() -> None:
    """Two choices of one prompt whose tables are equal throughout still read their last block each."""
    table = tuple(range(8))
    spans = [RowSpan(row, 1, 127, 128, table) for row in range(2)]
    (group,) = plan_groups(spans, shape(), num_rows=2, device=CPU)
    assert ids_of(group.shared) == list(range(7))


def test_one_group_of_all_rows_needs_no_row_numbers() -> None:
    spans = spans_of([(row, 200 + row) for row in range(3)])
    (group,) = plan_groups(spans, shape(num_kv_heads=2), num_rows=3, device=CPU)
    assert group.rows is None
    assert group.mask is not None
    assert group.mask.shape[0] == 6
    prompts_too = plan_groups(spans, shape(), num_rows=9, device=CPU)
    assert all(group.rows is not None for group in prompts_too)
