"""What a step takes is learned from waits: from few streams for many, from one endpoint for others, by and by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.busy_steps import CHANGE_MAX, FIXED_STREAMS, NEWEST_WEIGHT, STEP_UNDER_WAY, BusySteps

STEP_S = 0.1


def seen(times: int = 40, *, num_active: int = 2, step_s: float = STEP_S, busy: BusySteps | None = None) -> BusySteps:
    """Endpoint "a" takes `step_s` a step with so many requests, where 0.02 s were expected at first."""
    busy = busy or BusySteps()
    for _ in range(times):
        busy.saw("a", num_active, 3 * step_s, num_steps=3.0, expected_s=3 * 0.02)
    return busy


def test_nothing_is_known_before_anything_was_seen() -> None:
    busy = BusySteps()
    busy.saw("a", 3, 1.0, num_steps=0.0, expected_s=0.0)   # it met no step
    busy.saw("a", 3, 1.0, num_steps=0.5, expected_s=0.01)
    assert busy.step_s("a", 3) == 0.0


def test_what_was_seen_with_few_says_something_about_many_and_about_others() -> None:
    busy = seen()
    assert busy.step_s("a", 2) == pytest.approx(STEP_S, rel=0.01)
    assert busy.step_s("a", 2 + 2 * FIXED_STREAMS + 4) == pytest.approx(3 * STEP_S, rel=0.01)
    assert busy.step_s("never seen", 2) == pytest.approx(STEP_S, rel=0.01)


def test_each_endpoint_is_judged_by_itself_and_a_new_life_begins_as_the_others_are() -> None:
    busy = seen()
    for _ in range(40):
        busy.saw("b", 2, 0.04, num_steps=2.0, expected_s=0.2)
    assert busy.step_s("a", 2) == pytest.approx(STEP_S, rel=0.01)
    assert busy.step_s("b", 2) == pytest.approx(0.02, rel=0.01)
    busy.forget("a")
    assert busy.step_s("a", 2) == pytest.approx(0.02, rel=0.1)


def test_a_prompt_that_met_little_beyond_the_step_under_way_says_less() -> None:
    much, little, nothing = seen(), seen(), seen()
    much.saw("a", 2, 0.3, num_steps=1.5, expected_s=1.5 * STEP_S)
    little.saw("a", 2, 0.2, num_steps=1.0, expected_s=STEP_S)
    nothing.saw("a", 2, 0.1, num_steps=STEP_UNDER_WAY, expected_s=STEP_S / 2)
    assert much.step_s("a", 2) - STEP_S == pytest.approx(2 * (little.step_s("a", 2) - STEP_S), rel=0.01)
    assert nothing.step_s("a", 2) == seen().step_s("a", 2)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(-1e6, 1e6), st.floats(0.51, 1e3), st.floats(1e-6, 1e3))))
def test_one_observation_moves_little_and_never_below_nothing(waits: list[tuple[int, float, float, float]]) -> None:
    busy = BusySteps()
    for num_active, seconds, num_steps, expected_s in waits:
        before = busy.step_s("a", 5) or expected_s / num_steps / (num_active + FIXED_STREAMS) * (5 + FIXED_STREAMS)
        busy.saw("a", num_active, seconds, num_steps=num_steps, expected_s=expected_s)
        least = 1 - NEWEST_WEIGHT * (1 - 1 / CHANGE_MAX)
        most = 1 + NEWEST_WEIGHT * (CHANGE_MAX - 1)
        assert 0 < before * least <= busy.step_s("a", 5) * 1.000001 <= before * most * 1.00001
