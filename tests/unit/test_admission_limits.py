"""Buckets, meters and the estimate of the wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.admission.limits import Bucket, Limit, Meters, TenantMeter
from gateway.admission.places import may_hold_another
from gateway.admission.queue import FairQueue, ServiceRate, Waiting
from gateway.admission.tenants import Tenant, TenantLimits


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 150)), max_size=40))
def test_a_bucket_never_gives_more_than_its_rate_and_one_minutes_worth(steps: list[tuple[float, float]]) -> None:
    bucket, now, given_away = Bucket(100.0, 0.0), 0.0, 0.0
    for later, amount in steps:
        now += later
        wait_s = bucket.wait_s(amount, now)
        if wait_s == 0:
            bucket.take(amount, now)
            given_away += amount
            # What exceeds a whole minute's worth is a debt that is paid before anything else passes.
            assert given_away <= 100 + now * 100 / 60 + max(0.0, amount - 100) + 1e-6
        else:
            assert bucket.wait_s(amount, now + wait_s + 1e-6) == 0


def test_each_limit_refuses_by_itself_and_takes_nothing_then() -> None:
    meter = TenantMeter(TenantLimits(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2), 0.0)
    assert meter.enter(0.0) is None
    assert meter.enter(0.0) is None
    over = meter.enter(0.0)
    assert over is not None
    assert over.limit is Limit.CONCURRENCY
    meter.leave()
    over = meter.enter(0.0)
    assert over is not None
    assert (over.limit, over.retry_after_s) == (Limit.REQUESTS, 30.0)
    assert meter.enter(30.0) is None
    assert meter.take_prompt(60, 30.0) is None
    over = meter.take_prompt(60, 30.0)
    assert over is not None
    assert (over.limit, over.retry_after_s) == (Limit.TOKENS, 12.0)
    assert meter.take_prompt(40, 30.0) is None, "what was refused took nothing"


def test_generated_tokens_are_owed_by_the_next_request() -> None:
    meter = TenantMeter(TenantLimits(tokens_per_minute=60), 0.0)
    assert meter.enter(0.0) is None
    assert meter.take_prompt(60, 0.0) is None
    meter.take_output(30, 0.0)
    meter.leave()
    over = meter.enter(0.0)
    assert over is not None
    assert (over.limit, over.retry_after_s) == (Limit.TOKENS, 30.0)
    assert meter.enter(30.0) is None


def test_a_prompt_larger_than_a_minutes_worth_passes_when_the_bucket_is_full() -> None:
    meter = TenantMeter(TenantLimits(tokens_per_minute=60), 0.0)
    assert meter.take_prompt(600, 0.0) is None
    over = meter.take_prompt(1, 60.0)
    assert over is not None
    assert over.retry_after_s == pytest.approx(481.0)


def test_leaving_more_often_than_entering_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        TenantMeter(TenantLimits(), 0.0).leave()


def test_new_limits_hold_at_once_and_those_inside_still_count() -> None:
    meters, old = Meters(max_meters=2), Tenant("a", b"a", limits=TenantLimits(max_concurrent=5))
    assert meters.of(old, 0.0).enter(0.0) is None
    new = Tenant("a", b"a", limits=TenantLimits(max_concurrent=1))
    assert meters.of(old, 0.0) is meters.of(old, 0.0)
    over = meters.of(new, 0.0).enter(0.0)
    assert over is not None
    for name in "bcd":
        meters.of(Tenant(name, b""), 0.0)
    assert meters.of(new, 0.0).num_inside == 1, "one that is inside is not forgotten"
    meters.of(new, 0.0).leave()
    idle = meters.of(new, 0.0)
    for name in "bcd":
        meters.of(Tenant(name, b""), 0.0)
    assert meters.of(new, 0.0) is not idle


def test_the_wait_is_the_share_of_the_line_over_its_pace() -> None:
    rate = ServiceRate()
    assert rate.seconds_for(100) is None
    rate.began(0.0)
    for second in range(1, 11):
        rate.left(200, float(second), queue_is_empty=second == 10)
    assert rate.seconds_for(1000) == pytest.approx(5.0)
    rate.began(1000.0)
    rate.left(200, 1001.0, queue_is_empty=False)
    assert rate.seconds_for(1000) == pytest.approx(5.0), "the time without a line says nothing about the workers"


def test_a_newcomer_waits_for_its_own_line_and_as_much_of_the_others() -> None:
    queue = FairQueue(max_requests=100, max_bytes=100, ageing_s=10)
    for at in range(10):
        queue.offer(Waiting("flood", 100, 0, float(at)))
    assert queue.tokens_before("flood", 1.0) == 1000
    assert queue.tokens_before("quiet", 1.0) == 100
    queue.offer(Waiting("quiet", 100, 0, 10.0))
    assert queue.tokens_before("quiet", 1.0) == 300
    assert queue.tokens_before("quiet", 2.0) == 250


@pytest.mark.parametrize(("num_places", "ratio", "num_tenants", "num_left"), [
    (8, 0.125, 1, 1), (7, 0.125, 1, 0), (512, 0.125, 1, 64), (512, 0.125, 2, 34), (512, 0.0, 1, 0), (1, 0.9, 1, 0)])
def test_tenants_that_take_all_they_may_leave_places_to_others(num_places: int, ratio: float, num_tenants: int,
                                                               num_left: int) -> None:
    held = [0] * num_tenants
    while any(may_hold_another(count, num_places - sum(held), ratio) for count in held):
        held[held.index(min(held))] += 1
    assert num_places - sum(held) == num_left
    assert not num_left or may_hold_another(0, num_left, ratio), "who holds none finds one"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.2, "2"), (1e9, "120")])
def test_retry_after_is_whole_seconds_within_reason(seconds: float, header: str) -> None:
    assert errors.rate_limited("token_rate", seconds).headers == {"Retry-After": header}
    refused = errors.queue_full("The queue is full", "queue_full", seconds)
    assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "queue_full", header)
