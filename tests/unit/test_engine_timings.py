"""Phases of TTFT add up; gaps between tokens; the running rates that routing uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.timings import PAUSE_S, PHASES, EngineRates, SequenceTimings, StepTiming

seconds = st.floats(min_value=0.0, max_value=10.0)


def step(forward_s: float, ended_at: float, allocate_s: float = 0.0, sample_s: float = 0.0) -> StepTiming:
    return StepTiming(allocate_s, forward_s, sample_s, ended_at)


def test_no_token_means_no_phases() -> None:
    timings = SequenceTimings(arrived_at=5.0)
    timings.worked(step(1.0, 6.0), recompute=False)
    assert timings.phases() == {}
    assert timings.inter_token_p50_s() is None
    assert timings.inter_token_max_s() is None


def test_queue_is_the_time_in_which_no_step_worked_on_it() -> None:
    timings = SequenceTimings(arrived_at=10.0)
    timings.worked(step(1.0, 13.0, allocate_s=0.25, sample_s=0.5), recompute=False)
    timings.worked(step(2.0, 20.0), recompute=True)
    timings.token(20.0)
    assert timings.phases() == {"queue": 6.25, "allocate": 0.25, "prefill": 1.0, "recompute": 2.0, "sample": 0.5}


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds, st.booleans()), min_size=1, max_size=8))
def test_phases_add_up_to_the_ttft(steps: list[tuple[float, float, float, float, bool]]) -> None:
    now = 100.0
    timings = SequenceTimings(arrived_at=now)
    for idle_s, allocate_s, forward_s, sample_s, recompute in steps:
        now += idle_s + allocate_s + forward_s + sample_s
        timings.worked(StepTiming(allocate_s, forward_s, sample_s, now), recompute=recompute)
    timings.token(now)
    phases = timings.phases()
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == pytest.approx(now - 100.0, abs=1e-9)
    assert min(phases.values()) >= 0.0


def test_work_after_the_first_token_changes_no_phase() -> None:
    timings = SequenceTimings(arrived_at=0.0)
    timings.worked(step(1.0, 1.0), recompute=False)
    timings.token(1.0)
    before = timings.phases()
    timings.worked(step(9.0, 10.0), recompute=True)
    timings.token(10.0)
    assert timings.phases() == before


def test_gaps_between_tokens() -> None:
    timings = SequenceTimings(arrived_at=0.0)
    for at in (1.0, 2.0, 4.0, 5.0):
        timings.token(at)
    assert timings.inter_token_p50_s() == 1.0
    assert timings.inter_token_max_s() == 2.0


def test_rates_are_zero_before_anything_was_measured() -> None:
    rates = EngineRates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)


def test_a_mixed_step_charges_decode_rows_apart() -> None:
    rates = EngineRates()
    rates.observe(prefill_tokens=0, decode_rows=4, step_s=0.5)
    rates.observe(prefill_tokens=100, decode_rows=4, step_s=1.5)
    assert rates.decode_step_s == 0.5
    assert rates.prefill_tokens_per_s == 100.0


def test_more_decode_rows_than_ever_decoded_alone_are_no_slower_prefill() -> None:
    rates = EngineRates()
    rates.observe(prefill_tokens=1000, decode_rows=0, step_s=1.0)
    rates.observe(prefill_tokens=0, decode_rows=1, step_s=0.09)
    for _ in range(20):
        rates.observe(prefill_tokens=100, decode_rows=28, step_s=0.1 + 4 * 0.09)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.01), "36 rows for 9"
    assert rates.decode_step_s == 0.09
    rates.observe(prefill_tokens=100, decode_rows=28, step_s=0.1)
    assert rates.prefill_tokens_per_s < 1300, "a step is never all decoding"


def test_tiny_prefills_and_idle_steps_measure_nothing() -> None:
    rates = EngineRates()
    rates.observe(prefill_tokens=1, decode_rows=0, step_s=0.5)
    rates.observe(prefill_tokens=0, decode_rows=0, step_s=0.5)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)


def test_rates_follow_a_change_of_load() -> None:
    rates = EngineRates()
    for _ in range(50):
        rates.observe(prefill_tokens=100, decode_rows=0, step_s=1.0)
        rates.observe(prefill_tokens=0, decode_rows=1, step_s=0.1)
    for _ in range(50):
        rates.observe(prefill_tokens=100, decode_rows=0, step_s=2.0)
        rates.observe(prefill_tokens=0, decode_rows=1, step_s=0.2)
    assert rates.prefill_tokens_per_s == pytest.approx(50.0, rel=0.02)
    assert rates.decode_step_s == pytest.approx(0.2, rel=0.02)


def test_after_a_pause_the_first_prompt_counts_for_most_and_a_short_one_for_little() -> None:
    rates = EngineRates()
    for second in range(50):
        rates.observe(prefill_tokens=1000, decode_rows=0, step_s=10.0, at=float(second))
    rates.observe(prefill_tokens=1000, decode_rows=0, step_s=1.0, at=49.0 + PAUSE_S)
    assert rates.prefill_tokens_per_s < 115, "a pause like others"
    later = 200.0
    rates.observe(prefill_tokens=40, decode_rows=0, step_s=0.04, at=later)
    assert rates.prefill_tokens_per_s < 130
    rates.observe(prefill_tokens=2000, decode_rows=0, step_s=2.0, at=2 * later)
    assert rates.prefill_tokens_per_s > 450
    rates.observe(prefill_tokens=2000, decode_rows=0, step_s=2.0, at=3 * later)
    assert rates.prefill_tokens_per_s > 800
