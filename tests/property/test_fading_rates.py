"""A worker that was slow is tried again and regains its share; one that is slow is tried seldom."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.fading_rates import (
    FADES_AFTER_S,
    HALF_LIFE_MAX_S,
    HALF_LIFE_S,
    FadingRates,
    ReportedRates,
    faded_to,
    slowness,
    usual_rates,
)
from loadtests.sim.cluster import Cluster
from loadtests.sim.policies import POLICIES
from loadtests.sim.simulation import SimulationPlan, prepare
from loadtests.workloads import zero_sharing

speeds = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))
rates = st.builds(ReportedRates, speeds, speeds)
shares = st.floats(0, 1)
USUAL, SLOW = ReportedRates(4000.0, 0.02), ReportedRates(1000.0, 0.08)
SLOW_UNTIL_S = 20.0


@given(rates, rates, shares, shares)
def test_only_slowness_fades_further_with_age_and_never_past_what_is_usual(
        usual: ReportedRates, reported: ReportedRates, one: float, other: float) -> None:
    older, younger = sorted((one, other))
    before, after = faded_to(usual, reported, kept=younger), faded_to(usual, reported, kept=older)
    close = 1 + 1e-9
    for faded in (before, after):
        if not reported[0] or reported[0] >= usual[0]:
            assert faded[0] == reported[0]
        else:
            assert reported[0] / close <= faded[0] <= usual[0]
        if not usual[1] or reported[1] <= usual[1]:
            assert faded[1] == reported[1]
        else:
            assert usual[1] <= faded[1] <= reported[1] * close
    assert before[0] <= after[0] * close
    assert after[1] <= before[1] * close


@given(rates, rates, rates, shares)
def test_two_that_are_as_old_stay_in_order(usual: ReportedRates, one: ReportedRates, other: ReportedRates,
                                           kept: float) -> None:
    faded = [faded_to(usual, reported, kept=kept) for reported in (one, other)]
    close = 1 + 1e-9
    for at, sign in ((0, 1), (1, -1)):
        if one[at] and other[at] and sign * one[at] <= sign * other[at]:
            low, high = sorted((faded[0], faded[1]), key=lambda found, at=at, sign=sign: sign * found[at])
            assert faded[0][at] == low[at] or faded[0][at] <= high[at] * close


@given(st.lists(rates, min_size=1, max_size=9))
def test_as_many_are_slower_than_usual_as_are_faster_or_one_more(reported: list[ReportedRates]) -> None:
    usual = usual_rates(reported)
    known = [found[0] for found in reported if found[0]]
    assert usual[0] in known or not known
    assert sum(rate < usual[0] for rate in known) <= len(known) / 2
    assert sum(rate > usual[0] for rate in known) < max(1, len(known) / 2)
    steps = [found[1] for found in reported if found[1]]
    assert sum(step_s > usual[1] for step_s in steps) <= len(steps) / 2
    assert sum(step_s < usual[1] for step_s in steps) < max(1, len(steps) / 2)


def fleet(slow: ReportedRates = SLOW) -> FadingRates:
    fading = FadingRates()
    for endpoint_id, reported in (("a", USUAL), ("b", USUAL), ("slow", slow)):
        fading.saw(endpoint_id, "m", reported, has_work=False, now=0.0)
    fading.saw("other", "another model", ReportedRates(1.0, 100.0), has_work=False, now=0.0)
    return fading


def test_it_begins_after_a_while_and_whoever_is_as_fast_as_usual_is_as_reported() -> None:
    fading = fleet()
    assert fading.faded("slow", FADES_AFTER_S) is None
    assert fading.faded("slow", FADES_AFTER_S + HALF_LIFE_S) == (2000.0, 0.04), "half of the way from 4 times to 1"
    for endpoint_id in ("a", "other", "nobody"):
        assert fading.faded(endpoint_id, 1e6) is None


def test_work_and_rates_that_move_confirm() -> None:
    fading = fleet()
    fading.saw("slow", "m", SLOW, has_work=False, now=50.0)
    assert fading.faded("slow", 50.0) is not None, "a report that says the same of an idle worker is no news"
    fading.saw("slow", "m", SLOW, has_work=True, now=60.0)
    assert fading.faded("slow", 60.0 + FADES_AFTER_S) is None
    fading.saw("slow", "m", ReportedRates(990.0, 0.08), has_work=False, now=100.0)
    assert fading.faded("slow", 100.0 + FADES_AFTER_S) is None
    fading.tried("slow", 200.0)
    assert fading.faded("slow", 200.0 + FADES_AFTER_S) is None
    fading.forget("slow")
    assert fading.faded("slow", 1e6) is None


@settings(max_examples=30, deadline=None)
@given(st.floats(2.0, 1000.0), st.lists(st.floats(0.9, 1.1), min_size=20, max_size=20), st.floats(1.0, 2.0))
def test_a_slow_one_is_tried_less_and_less(factor: float, noise: list[float], asks_at: float) -> None:
    """Somebody asks every four seconds, and goes there once it looks at most `asks_at` times slower, or alike."""
    fading = fleet(ReportedRates(4000.0 / factor, 0.02 * factor))
    tries, hour = [], 3600
    for second in range(4, hour, 4):
        now = float(second)
        faded = fading.faded("slow", now)
        if faded is not None and slowness(faded, USUAL) <= max(1.01, min(asks_at, factor / 1.2)):
            fading.tried("slow", now)
            tries.append(now)
            moved = factor * noise[len(tries) % len(noise)]
            fading.saw("slow", "m", ReportedRates(4000.0 / moved, 0.02 * moved), has_work=False, now=now + 0.5)
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert all(gap >= FADES_AFTER_S for gap in gaps)
    assert len(tries) >= 2
    if asks_at == 1.0:
        assert len(tries) <= 3 + hour / HALF_LIFE_MAX_S / 2


def test_a_try_that_finds_it_slow_doubles_the_patience_and_one_that_finds_it_well_resets_it() -> None:
    fading, now, half_lives = fleet(), 0.0, []
    for number in range(6):
        now += 1000.0
        fading.tried("slow", now)
        fading.saw("slow", "m", ReportedRates(1001.0 + number, 0.08), has_work=False, now=now)
        half_lives.append(fading._known["slow"].half_life_s)
    assert half_lives == [30.0, 60.0, 120.0, 120.0, 120.0, 120.0]
    fading.tried("slow", now)
    fading.saw("slow", "m", ReportedRates(2200.0, 0.03), has_work=False, now=now + 2)
    assert fading._known["slow"].half_life_s == 120.0, "it is recovering"
    fading.saw("slow", "m", ReportedRates(3900.0, 0.02), has_work=False, now=now + 3)
    assert fading._known["slow"].half_life_s == HALF_LIFE_S


def test_a_try_that_brings_no_news_doubles_the_patience_and_work_that_comes_anyway_does_not() -> None:
    fading = fleet()
    fading.tried("slow", 100.0)
    fading.tried("slow", 200.0)
    assert fading._known["slow"].half_life_s == 2 * HALF_LIFE_S
    fading = fleet()
    for number in range(9):
        fading.saw("slow", "m", ReportedRates(1001.0 + number, 0.08), has_work=True, now=float(number))
    assert fading._known["slow"].half_life_s == HALF_LIFE_S


def share_of_one_that_was_slow(factor: float, *, until: float | None) -> list[tuple[float, bool]]:
    """Simulated: two workers, a request every four seconds. When each came, and whether it went to the slow one."""
    prepared = prepare(zero_sharing(200, 101), SimulationPlan(num_workers=2, load=0.02, capacity=0.2, seed=101))
    cluster = Cluster(prepared.trace, prepared.settings, POLICIES["headstart"])
    worker, model = cluster.workers[1], cluster.workers[1].model
    slow = replace(model, **{name: factor * getattr(model, name)
                             for name in ("floor_s", "weights_s", "token_s", "pair_s", "context_s", "row_s")})
    cluster.clock.at(0.0, lambda: setattr(worker, "model", slow))
    if until is not None:
        cluster.clock.at(until, lambda: setattr(worker, "model", model))
    cluster.run()
    return [(request.arrives_at, request.worker_id == worker.worker_id) for request in cluster.requests]


def test_one_that_was_slow_for_a_while_has_its_share_again_three_minutes_later() -> None:
    sent = share_of_one_that_was_slow(20.0, until=SLOW_UNTIL_S)
    later = [there for at, there in sent if at > SLOW_UNTIL_S + 180]
    assert len(later) > 100
    assert 0.3 < sum(later) / len(later) < 0.7


def test_one_that_is_slow_gets_few() -> None:
    sent = share_of_one_that_was_slow(20.0, until=None)
    assert 1 <= sum(there for _, there in sent) <= 2 + sent[-1][0] / 180
