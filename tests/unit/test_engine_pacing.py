"""From measured steps to a pace, and its correction. Durations are made up: nothing here is timed."""

from __future__ import annotations

import pytest

from worker.engine.pacing import AIM_RATIO, CORRECTION_MAX, CORRECTION_MIN, Pacer, measure_pace
from worker.engine.timings import BandwidthMeter


def machine(floor_s: float, token_s: float, context_s: float = 0.0):  # type: ignore[no-untyped-def]
    """A machine on which a step costs so much."""
    measured: list[range] = []

    def measure(positions: range) -> float:
        measured.append(positions)
        return floor_s + len(positions) * (token_s + context_s * (positions.start + len(positions) / 2))

    return measure, measured


@pytest.mark.parametrize(("floor_s", "token_s", "context_s"), [
    (0.0, 0.001, 0.0), (0.02, 0.001, 2e-7), (0.1, 1e-4, 0.0)])
def test_a_chunk_of_the_pace_takes_the_target_at_most(floor_s: float, token_s: float, context_s: float) -> None:
    measure, _ = machine(floor_s, token_s, context_s)
    pace = measure_pace(measure, target_s=0.2, tokens_max=2048, context_max=8192)
    for start in (0, 1000, 6000):
        num_tokens = pace.tokens_within(pace.target_s, start)
        assert num_tokens >= 16
        assert measure(range(start, start + num_tokens)) <= 0.2


def test_what_is_measured_fits_into_step_and_context() -> None:
    measure, measured = machine(0.0, 1e-5, 1e-9)
    measure_pace(measure, target_s=10.0, tokens_max=100, context_max=150)
    assert all(len(positions) <= 100 and positions.stop <= 150 for positions in measured)
    pace = measure_pace(measure, target_s=10.0, tokens_max=1, context_max=1)
    assert pace.target_s == 10.0 * AIM_RATIO


def test_a_slower_machine_gets_smaller_chunks_at_once_and_larger_ones_slowly() -> None:
    measure, _ = machine(0.0, 0.001)
    pacer = Pacer(measure_pace(measure, target_s=0.2, tokens_max=512, context_max=8192))
    whole = pacer.pace.tokens_within(pacer.pace.target_s, 0)
    for _ in range(6):
        pacer.observe(chunks=[(0, 100)], prefill_s=0.4)
    slow = pacer.pace.tokens_within(pacer.pace.target_s, 0)
    assert whole / 4.2 <= slow <= whole / 3.8
    pacer.observe(chunks=[(0, 100)], prefill_s=0.1)
    assert slow <= pacer.pace.tokens_within(pacer.pace.target_s, 0) < 1.2 * slow


@pytest.mark.parametrize(("prefill_s", "bound"), [
    (1e9, CORRECTION_MAX), (-1.0, CORRECTION_MIN), (0.0, CORRECTION_MIN)])
def test_the_correction_is_bounded(prefill_s: float, bound: float) -> None:
    measure, _ = machine(0.0, 0.001)
    pacer = Pacer(measure_pace(measure, target_s=0.2, tokens_max=512, context_max=8192))
    for _ in range(200):
        pacer.observe(chunks=[(0, 100)], prefill_s=prefill_s)
    assert pacer.correction == pytest.approx(bound)


def test_a_share_too_small_to_tell_corrects_nothing() -> None:
    measure, _ = machine(0.0, 0.001)
    pacer = Pacer(measure_pace(measure, target_s=0.2, tokens_max=512, context_max=8192))
    pacer.observe(chunks=[(0, 15)], prefill_s=9.0)
    assert pacer.correction == 1.0


def test_bandwidth_is_a_share_of_the_peak() -> None:
    meter = BandwidthMeter(1000.0)
    assert meter.ratio == 0.0
    meter.observe(num_bytes=250, step_s=0.5)
    assert meter.ratio == 0.5
    for _ in range(100):
        meter.observe(num_bytes=10_000, step_s=0.5)
    assert meter.ratio == pytest.approx(1.0, abs=1e-4)
    BandwidthMeter(0.0).observe(num_bytes=1, step_s=1.0)
