"""How many threads decode: fewer only while all are kept waiting and fewer are faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.model.compiled.team_size import FIRST_TURN, PATIENCE, TURN_MAX, TeamSize


def sizes(team: TeamSize, count: int, *, whole_s: float, half_s: float, in_vain: bool, whole: int = 4) -> list[int]:
    found = []
    for _ in range(count):
        found.append(team.now)
        team.took(whole_s if team.now == whole else half_s, in_vain and team.now == whole)
    return found


def test_all_threads_as_long_as_they_meet() -> None:
    assert sizes(TeamSize(4), 1000, whole_s=2.0, half_s=1.0, in_vain=False) == [4] * 1000


def test_half_of_them_for_longer_and_longer_while_that_is_faster() -> None:
    team = TeamSize(4)
    for turn in (8, 16, 32, 64, 128, 256, TURN_MAX, TURN_MAX):
        assert sizes(team, 1 + turn, whole_s=2.0, half_s=1.0, in_vain=True) == [4] + [2] * turn
    assert sizes(team, 3, whole_s=2.0, half_s=1.0, in_vain=False) == [4] * 3, "a step in which they meet ends it"
    assert sizes(team, 2 + FIRST_TURN, whole_s=2.0, half_s=1.0, in_vain=True) == [4] + [2] * FIRST_TURN + [4]


@pytest.mark.parametrize("half_s", [1.0, 1.5])
def test_half_of_them_are_seldom_tried_where_they_are_no_faster(half_s: float) -> None:
    """Shares of a large model's step may differ by more than anybody looks."""
    team = TeamSize(4)
    found = sizes(team, 4 * PATIENCE, whole_s=1.0, half_s=half_s, in_vain=True)
    assert found[:FIRST_TURN + 2 + PATIENCE] == [4] + [2] * FIRST_TURN + [4] * (PATIENCE + 1)
    assert found.count(2) <= 4 * FIRST_TURN


@given(whole=st.integers(1, 9), steps=st.lists(st.tuples(st.floats(0.001, 1), st.booleans())))
def test_never_none_and_never_more(whole: int, steps: list[tuple[float, bool]]) -> None:
    team = TeamSize(whole)
    for seconds, in_vain in steps:
        assert team.now in (whole, max(1, whole // 2))
        team.took(seconds, in_vain and whole > 1)
