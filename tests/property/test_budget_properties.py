"""Budgets by the calendar, against datetime and a naive book of what was spent."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.budget import Budget, BudgetMeter, Window, window_begin, window_end

INSTANTS = st.floats(min_value=0, max_value=4_102_444_800, allow_nan=False)  # to 2100


def begin_by_datetime(window: Window, wall_s: float) -> datetime.datetime:
    at = datetime.datetime.fromtimestamp(wall_s, datetime.UTC).replace(minute=0, second=0, microsecond=0)
    if window is Window.HOUR:
        return at
    at = at.replace(hour=0)
    if window is Window.WEEK:
        return at - datetime.timedelta(days=at.weekday())
    return at.replace(day=1) if window is Window.MONTH else at


@given(st.sampled_from(Window), INSTANTS)
def test_windows_begin_and_end_by_the_calendar(window: Window, wall_s: float) -> None:
    wall_s = float(int(wall_s))
    begin, end = window_begin(window, wall_s), window_end(window, wall_s)
    assert begin == begin_by_datetime(window, wall_s).timestamp() <= wall_s < end
    assert window_begin(window, end) == end
    assert window_begin(window, end - 1) == begin


@given(st.sampled_from(Window), st.integers(1, 500), INSTANTS,
       st.lists(st.tuples(st.floats(0, 40_000), st.integers(0, 300), st.booleans()), max_size=40))
def test_what_passes_is_what_a_book_would_let_pass(window: Window, tokens: int, start: float,
                                                   steps: list[tuple[float, int, bool]]) -> None:
    meter, now = BudgetMeter(Budget(tokens, window)), start
    book: list[tuple[float, int]] = []
    for pause_s, amount, is_output in steps:
        now += pause_s
        spent = sum(taken for at, taken in book if window_begin(window, at) == window_begin(window, now))
        assert meter.left(now) == max(0, tokens - spent)
        may = spent < tokens and (not spent or spent + amount <= tokens)
        wait_s = meter.wait_s(amount, now)
        assert (wait_s == 0) is may
        if not may:
            assert now + wait_s == pytest.approx(window_end(window, now))
        if may or is_output:
            meter.take(amount, now)
            book.append((now, amount))


def test_the_state_goes_on_in_another_meter() -> None:
    budget = Budget(100, Window.DAY)
    first, second = BudgetMeter(budget), BudgetMeter(budget)
    first.take(90, 1_000_000)
    second.state = first.state
    assert second.wait_s(11, 1_000_001) == window_end(Window.DAY, 1_000_001) - 1_000_001
    assert second.wait_s(10, 1_000_001) == 0
    assert second.wait_s(11, 1_000_000 + 86_400) == 0
