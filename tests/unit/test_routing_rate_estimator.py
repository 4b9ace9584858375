"""What is believed of an endpoint's speed: medians, forgotten with time, and a report that may be wrong."""

from __future__ import annotations

import pytest

from gateway.routing.rate_estimator import (
    SAMPLES_KEPT,
    SAMPLES_MIN,
    STALE_S,
    STRETCH_MAX,
    TRUST_RATIO,
    RateEstimator,
    Stretch,
    settled,
)


def test_too_few_say_nothing_and_a_stray_one_neither() -> None:
    rates = RateEstimator()
    for number in range(SAMPLES_MIN - 1):
        rates.first_token("a", 1000, 0.5, now=float(number))
    assert rates.prefill_tokens_per_s("a", 1000, now=2.0) == 0.0
    rates.first_token("a", 1000, 0.5, now=2.0)
    assert rates.prefill_tokens_per_s("a", 1000, now=2.0) == 2000.0
    rates.first_token("a", 1000, 500.0, now=2.0)
    rates.first_token("a", 1000, 1e-9, now=2.0)
    assert rates.prefill_tokens_per_s("a", 1000, now=2.0) == 2000.0
    assert rates.prefill_tokens_per_s("b", 1000, now=2.0) == 0.0


def test_a_worker_that_has_become_slower_is_believed_slower_and_old_news_are_none() -> None:
    rates = RateEstimator()
    for number in range(100):
        rates.inter_token("a", 4, 0.01 if number < 50 else 0.04, now=float(number))
    assert rates.decode_step_s("a", 4, now=100.0) == 0.04
    assert rates.decode_step_s("a", 4, now=99.0 - SAMPLES_KEPT + SAMPLES_MIN + STALE_S) == 0.04
    assert rates.decode_step_s("a", 4, now=100.0 + STALE_S) == 0.0


def test_lengths_and_batches_apart_and_the_next_one_for_want_of_better() -> None:
    rates = RateEstimator()
    for _ in range(SAMPLES_MIN):
        rates.first_token("a", 300, 0.1, now=0.0)
        rates.first_token("a", 40_000, 20.0, now=0.0)
        rates.inter_token("a", 1, 0.01, now=0.0)
        rates.inter_token("a", 60, 0.05, now=0.0)
    assert rates.prefill_tokens_per_s("a", 300, now=0.0) == rates.prefill_tokens_per_s("a", 600, now=0.0) == 3000.0
    assert rates.prefill_tokens_per_s("a", 50_000, now=0.0) == 2000.0
    assert rates.prefill_tokens_per_s("a", 3000, now=0.0) == 0.0
    assert (rates.decode_step_s("a", 1, now=0.0), rates.decode_step_s("a", 40, now=0.0)) == (0.01, 0.05)
    rates.forget("a")
    assert rates.decode_step_s("a", 1, now=0.0) == 0.0


@pytest.mark.parametrize(("tokens", "seconds"), [(255, 0.1), (1000, 0.0), (1000, -1.0)])
def test_what_measures_nothing_is_not_counted(tokens: int, seconds: float) -> None:
    rates = RateEstimator()
    for _ in range(9):
        rates.first_token("a", tokens, seconds, now=0.0)
    assert rates.prefill_tokens_per_s("a", max(tokens, 256), now=0.0) == 0.0


@pytest.mark.parametrize(("reported", "observed", "reckoned"), [
    (0.0, 0.0, 0.0), (1000.0, 0.0, 1000.0), (0.0, 700.0, 700.0), (1000.0, 700.0, 1000.0),
    (1000.0, 1000.0 / TRUST_RATIO / 1.01, 1000.0 / TRUST_RATIO / 1.01), (1000.0, 3100.0, 3100.0)])
def test_a_report_counts_unless_it_is_far_from_what_is_seen(reported: float, observed: float,
                                                            reckoned: float) -> None:
    assert settled(reported, observed) == reckoned


def test_stretch_is_the_mean_of_tokens_over_steps_within_bounds() -> None:
    stretch = Stretch()
    for _ in range(200):
        stretch.saw(0.06, 0.02)
    assert stretch.ratio == pytest.approx(3.0, rel=0.01)
    stretch.saw(0.06, 0.0)
    assert stretch.ratio == pytest.approx(3.0, rel=0.01)
    for _ in range(500):
        stretch.saw(100.0, 0.02)
    assert stretch.ratio <= STRETCH_MAX
    for _ in range(500):
        stretch.saw(0.001, 0.02)
    assert 1.0 <= stretch.ratio < 1.01
