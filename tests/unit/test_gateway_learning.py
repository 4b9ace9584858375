"""Rates at odds with what streams took are replaced; those that agree are left alone, and looked up by nobody."""

from __future__ import annotations

import time

import pytest

from gateway.routing.cost import SLOW_TIER_RATIO
from gateway.routing.endpoint import EndpointView
from gateway.routing.picker import PickInput, RoutingDecision, pick
from gateway.routing.prefix_index import Match
from gateway.server.learning import Learning
from gateway.server.request_record import RequestRecord

REPORTED = (4000.0, 0.02)


def decided(epoch: str = "1") -> RoutingDecision:
    decision = pick(PickInput([EndpointView("a", epoch, prefill_tokens_per_s=REPORTED[0], decode_step_s=REPORTED[1])],
                              prompt_tokens=1000, matches={}))
    assert isinstance(decision, RoutingDecision)
    return decision


def stream(learning: Learning, *, first_token_s: float, inter_token_s: float = 0.02, epoch: str = "1",
           reported: tuple[float, float] = REPORTED) -> None:
    """One that has ended, `first_token_s` after its worker was chosen."""
    record = RequestRecord("id", "/", model="m", stream=True, worker_id="a", admitted=True, outcome="ok",
                           completion_tokens=10, inter_token_s=inter_token_s)
    learning.placed(record, decided(epoch), None, reported=reported)
    assert record.placed_at is not None
    record.ttft_s = record.placed_at + first_token_s - record.began_at
    learning.ended(record)


def rates(learning: Learning, reported: tuple[float, float] = REPORTED) -> tuple[float, float]:
    [view] = learning.with_rates([EndpointView("a", "1", prefill_tokens_per_s=reported[0],
                                               decode_step_s=reported[1])], 1000)
    return view.prefill_tokens_per_s, view.decode_step_s


def test_a_report_that_agrees_is_left_alone() -> None:
    learning = Learning()
    for _ in range(5):
        stream(learning, first_token_s=0.3)
    views = [EndpointView("a", "1", prefill_tokens_per_s=4000.0, decode_step_s=0.02)]
    assert learning.with_rates(views, 1000) is views


def test_a_report_far_off_gives_way_and_comes_back_with_a_new_life() -> None:
    learning = Learning()
    for _ in range(5):
        stream(learning, first_token_s=10.0, inter_token_s=0.5)
    assert rates(learning) == pytest.approx((100.0, 0.5 / learning.stretch.ratio))
    stream(learning, first_token_s=0.25, epoch="2")
    assert rates(learning) == REPORTED


def test_an_engine_without_rates_is_judged_by_what_its_streams_take() -> None:
    learning = Learning()
    assert rates(learning, (0.0, 0.0)) == (0.0, 0.0)
    for _ in range(5):
        stream(learning, first_token_s=0.5, inter_token_s=0.03, reported=(0.0, 0.0))
    assert rates(learning, (0.0, 0.0)) == pytest.approx((2000.0, 0.03))


def test_waits_at_busy_workers_teach_how_long_a_step_is_there_and_waits_for_memory_do_not() -> None:
    learning = Learning()
    decision = pick(PickInput([EndpointView("a", "1", prefill_tokens_per_s=REPORTED[0], decode_step_s=REPORTED[1],
                                            num_running=4, step_tokens=100)], prompt_tokens=1000, matches={}))
    assert isinstance(decision, RoutingDecision)
    expected = decision.cost
    assert expected is not None
    learning.first_token(expected._replace(room_s=1.0), time.monotonic() - 50.0)
    assert learning.busy_steps.step_s("a", 4) == 0.0
    for _ in range(40):
        learning.first_token(expected, time.monotonic() - expected.prefill_s - 5.0)
    assert learning.busy_steps.step_s("a", 4) == pytest.approx(5.0 / expected.num_steps, rel=0.01)
    stream(learning, first_token_s=0.3, epoch="2")
    stream(learning, first_token_s=0.3, epoch="3")
    assert "a" not in learning.busy_steps._shares, "another life"


def test_what_is_no_streams_first_token_teaches_nothing() -> None:
    learning = Learning()
    record = RequestRecord("id", "/", model="m", stream=False, worker_id="a", admitted=True, outcome="ok")
    for _ in range(5):
        learning.placed(record, decided(), None, reported=REPORTED)
        record.ttft_s = time.monotonic() - record.began_at + 50.0
        learning.ended(record)
    assert rates(learning) == REPORTED


def test_first_tokens_of_what_was_loaded_teach_the_tier_and_not_the_rate() -> None:
    learning = Learning()

    def load(cached_tokens: int | None, epoch: str = "1") -> None:
        view = EndpointView("a", epoch, prefill_tokens_per_s=REPORTED[0], decode_step_s=REPORTED[1])
        decision = pick(PickInput([view], prompt_tokens=1000, matches={"a": Match(50, 0, 50)},
                                  tier_ratio_of=learning.tier_ratio))
        assert isinstance(decision, RoutingDecision)
        record = RequestRecord("id", "/", model="m", stream=True, worker_id="a", admitted=True, outcome="ok",
                               completion_tokens=10, cached_tokens=cached_tokens)
        learning.placed(record, decision, None, reported=REPORTED)
        assert record.placed_at is not None
        record.ttft_s = record.placed_at + 2.0 - record.began_at
        learning.ended(record)

    for cached_tokens in (None, 0, 799):
        load(cached_tokens)
        assert learning.tier_ratio("a") == SLOW_TIER_RATIO, "it was not found, or nobody says so"
    for _ in range(12):
        load(800)
    assert learning.tier_ratio("a") > 3.0
    assert rates(learning) == REPORTED
    load(0, epoch="2")
    assert learning.tier_ratio("a") == SLOW_TIER_RATIO, "another life"


def test_a_worker_that_reports_that_it_is_slow_no_more_is_not_held_against_it() -> None:
    learning, slow = Learning(), (REPORTED[0] / 10, REPORTED[1] * 10)
    for _ in range(9):
        stream(learning, first_token_s=2.6, inter_token_s=0.2, reported=slow)
    assert rates(learning, slow) == slow
    for _ in range(3):
        stream(learning, first_token_s=0.26, reported=REPORTED)
        assert rates(learning) == REPORTED
