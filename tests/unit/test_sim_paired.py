"""Ratios of pairs, their interval, and how a cell is judged."""

from __future__ import annotations

import math

import pytest

from loadtests.sim.paired import paired_ratio, verdict


def test_what_seeds_differ_in_does_not_widen_the_interval() -> None:
    ratio = paired_ratio([1.0, 10.0, 0.5], [2.0, 20.0, 1.0])
    assert ratio == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_is_students_t_on_logarithms() -> None:
    ratio = paired_ratio([math.e, 1.0], [1.0, 1.0])  # logs 1 and 0: deviation 0.7071, t 12.706
    assert ratio.mean == pytest.approx(math.exp(0.5))
    assert ratio.high == pytest.approx(math.exp(0.5 + 12.706 * 0.5), rel=1e-3)
    assert paired_ratio([3.0], [2.0]) == pytest.approx((1.5, None, None), nan_ok=True)


@pytest.mark.parametrize(("ours", "outcome", "sure"), [
    ([0.8, 0.81], "wins", True), ([1.01, 1.01], "within", True), ([1.5, 1.5], "loses", True),
    ([0.5, 1.5], "wins", False),
    ([1.0, 1.0], "within", False)])
def test_ours_is_judged_against_the_baseline_that_is_best(ours: list[float], outcome: str, sure: bool) -> None:
    by_seed = [{"headstart": {"p": own}, "a": {"p": 1.0}, "b": {"p": 4.0}} for own in ours]
    judged = verdict(by_seed, "p")
    assert (judged["outcome"], judged["rival"], judged["sure"]) == (outcome, "a", sure)
    assert judged["against"]["b"] < judged["against"]["a"]
