"""What the flood benchmark makes of its answers."""

from __future__ import annotations

import random

import pytest

from loadtests.flood_arms import WINDOW_S, Arm, quantile, ratio
from loadtests.open_loop import Answered


def arm(seed: int, *, slower: float = 1.0, num_rounds: int = 12, per_round: int = 100) -> Arm:
    chance, found = random.Random(seed), Arm()
    for number in range(num_rounds):
        found.add(number, [Answered(200, slower * chance.expovariate(10), 1.0, chance.uniform(0, 4 * WINDOW_S), 0.001)
                           for _ in range(per_round)], num_broken=0)
    return found


def test_a_quantile_is_one_of_the_times() -> None:
    times = [float(number) for number in range(100)]
    assert quantile(times, 0.0) == 0.0
    assert quantile(times, 0.5) == 50.0
    assert quantile(times, 0.99) == quantile(times, 1.0) == 99.0


def test_a_refused_request_has_no_time_and_is_counted() -> None:
    found = Arm()
    found.add(0, [Answered(200, 0.5, 0.6, 0.0, 0.0), Answered(429, 0.1, 0.1, 0.0, 0.0)], num_broken=2)
    assert found.ttfts_s == [0.5]
    assert found.summary()["answers"] == {"200": 1, "429": 1}
    assert found.num_broken == 2


def test_arms_that_differ_are_told_from_arms_that_do_not() -> None:
    same = ratio(arm(1), [arm(2), arm(3)], 0.99, seed=1)
    assert same.low < same.value < same.high
    assert same.low < 1.0 < same.high
    slower = ratio(arm(1, slower=3.0), [arm(2), arm(3)], 0.99, seed=1)
    assert slower.value == pytest.approx(3 * same.value)
    assert slower.low > 1.0


def test_what_happens_in_one_stretch_alone_makes_the_ratio_unsure() -> None:
    """A hiccup of the machine is many late requests and one event."""
    hit = arm(1)
    hit.windows[3, 2] = [5.0] * len(hit.windows[3, 2])
    found = ratio(hit, [arm(2)], 0.99, seed=1)
    assert found.value > 5
    assert found.low < 2
