"""Prefill beside decoding is bounded in time; static batching lets nobody in; what held blocks waste is counted."""

from __future__ import annotations

import pytest

from tests.support.core_builders import drive, make_scheduler, make_sequence, shares, step
from worker.core.prefill_pace import TOKENS_MIN, PrefillPace
from worker.core.scheduler import Batching
from worker.core.waste import Waste

TENTH = PrefillPace(target_s=0.1, token_s=0.001)    # a hundred positions


@pytest.mark.parametrize(("pace", "start", "num_tokens"), [
    (TENTH, 0, 100), (TENTH, 5000, 100),
    (PrefillPace(0.1, 0.001, 0.000001), 1000, 49), (PrefillPace(0.1, 0.001, 0.000001), 9000, 9),
    (PrefillPace(0.0001, 0.001), 0, 0),
])
def test_seconds_become_positions(pace: PrefillPace, start: int, num_tokens: int) -> None:
    assert pace.tokens_within(pace.target_s, start) == num_tokens
    assert pace.seconds(start, num_tokens) <= pace.target_s
    assert pace.seconds(start, num_tokens + 1) > pace.target_s - 1e-9


def test_a_long_prefill_beside_decoding_goes_on_in_chunks_of_the_pace() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=512, pace=TENTH)
    scheduler.submit(make_sequence(1, range(40), 30))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(1000, 1600)))
    assert [shares(step(scheduler)) for _ in range(3)] == [
        {1: (40, 1), 2: (0, 100)}, {1: (41, 1), 2: (100, 100)}, {1: (42, 1), 2: (200, 100)}]
    drive(scheduler)


def test_alone_a_prefill_has_the_whole_budget() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=512, pace=TENTH)
    scheduler.submit(make_sequence(2, range(600)))
    assert shares(step(scheduler)) == {2: (0, 512)}
    drive(scheduler)


def test_whatever_the_target_a_prefill_goes_on() -> None:
    scheduler = make_scheduler(100, pace=PrefillPace(target_s=0.001, token_s=1.0))
    scheduler.submit(make_sequence(1, range(40), 30))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(1000, 1100)))
    scheduler.submit(make_sequence(3, range(2000, 2100)))
    assert shares(step(scheduler)) == {1: (40, 1), 2: (0, TOKENS_MIN)}
    assert scheduler.token_budget == TOKENS_MIN
    drive(scheduler)


def test_a_short_prompt_and_a_full_hit_are_admitted_beside_a_long_prefill() -> None:
    scheduler = make_scheduler(100, pace=TENTH)
    scheduler.submit(make_sequence(0, range(500, 564), 1))
    drive(scheduler)
    scheduler.submit(make_sequence(1, range(40), 30))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(1000, 1600)))
    step(scheduler)
    scheduler.submit(make_sequence(3, range(500, 564), 5))
    scheduler.submit(make_sequence(4, range(3000, 3010), 5))
    scheduler.submit(make_sequence(5, range(4000, 4100), 5))
    assert list(shares(step(scheduler))) == [1, 2, 3, 4], "the fifth is no small matter"
    drive(scheduler)


def test_many_short_prompts_overdraw_the_time_once() -> None:
    scheduler = make_scheduler(200, pace=TENTH)
    scheduler.submit(make_sequence(1, range(40), 30))
    step(scheduler)
    for seq_id in range(2, 40):
        scheduler.submit(make_sequence(seq_id, range(100 * seq_id, 100 * seq_id + 15)))
    plan = step(scheduler)
    assert plan.num_tokens - 1 <= 200 + TOKENS_MIN
    drive(scheduler)


def test_a_static_batch_lets_nobody_in_until_it_has_ended() -> None:
    scheduler = make_scheduler(100, max_running=3, batching=Batching.STATIC)
    for seq_id, max_new_tokens in enumerate([2, 6, 3, 2]):
        scheduler.submit(make_sequence(seq_id, range(100 * seq_id, 100 * seq_id + 20), max_new_tokens))
    plans = drive(scheduler)
    assert [list(shares(plan)) for plan in plans] == [
        [0, 1, 2], [0, 1, 2], [1, 2], [1], [1], [1], [3], [3]]


def test_a_static_batch_may_need_several_steps_to_begin() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=32, batching=Batching.STATIC)
    for seq_id in range(3):
        scheduler.submit(make_sequence(seq_id, range(100 * seq_id, 100 * seq_id + 32), 2))
    step(scheduler)
    scheduler.submit(make_sequence(9, range(900, 932), 2))
    plans = drive(scheduler)
    assert [set(shares(plan)) & {9} for plan in plans].index({9}) == len(plans) - 2, "it was not there at the start"


def test_waste_is_tails_reserves_and_duplicates() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=64)
    assert scheduler.waste() == Waste()
    scheduler.submit(make_sequence(1, range(100), 5))
    step(scheduler)
    assert scheduler.waste() == Waste(tail=0, reserved=3 * 16, duplicate=0), "64 of 100 positions in 7 blocks"
    step(scheduler)
    assert scheduler.waste() == Waste(tail=12, reserved=0, duplicate=0)
    scheduler.submit(make_sequence(2, range(100), 5))
    step(scheduler)
    assert scheduler.waste() == Waste(tail=11 + 12, reserved=0, duplicate=4)
    drive(scheduler)
    assert scheduler.waste() == Waste()
