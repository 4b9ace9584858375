"""How soon a worker that is out is looked at again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.lost_looks import (
    BACKOFF_MAX_S,
    LOOK_SHARE_S,
    RETURN_LOOK_S,
    RETURN_LOOKS,
    look_at_lost_after_s,
)

INTERVALS = st.floats(0.01, 60.0)
FAILURES = st.integers(1, 100_000)
WORKERS = st.integers(1, 4096)


def test_one_that_was_away_for_a_minute_waits_half_a_second_for_the_next_look() -> None:
    pauses = [look_at_lost_after_s(1.0, number, 2) for number in range(3, RETURN_LOOKS + 1)]
    assert set(pauses) == {RETURN_LOOK_S}
    assert sum(pauses) > 55.0


def test_one_that_stays_away_costs_less_and_less() -> None:
    pauses = [look_at_lost_after_s(1.0, number, 2) for number in range(RETURN_LOOKS, RETURN_LOOKS + 9)]
    assert pauses == [0.5, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]


@given(INTERVALS, FAILURES, WORKERS)
def test_the_pace_is_bounded(usual_s: float, num_failures: int, num_workers: int) -> None:
    after_s = look_at_lost_after_s(usual_s, num_failures, num_workers)
    assert after_s >= min(usual_s, RETURN_LOOK_S)
    assert after_s <= max(usual_s, BACKOFF_MAX_S)
    assert after_s >= min(usual_s, LOOK_SHARE_S * num_workers), "all of them out cost no more than so many looks"
    assert look_at_lost_after_s(usual_s, num_failures + 1, num_workers) >= after_s, "it never gets more often"
