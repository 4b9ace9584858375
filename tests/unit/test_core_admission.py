"""Admission and refusal: who gets in, in which order, with how much room left, and what is answered to the others."""

from __future__ import annotations

import pytest

from tests.support.core_builders import drive, make_pool, make_scheduler, make_sequence, shares, step
from worker.core.scheduler import KvCacheMode, Refusal, RefusalReason, Scheduler, SchedulerConfig


def test_the_smaller_priority_number_goes_first_then_arrival() -> None:
    scheduler = make_scheduler(40, max_running=1)
    for seq_id, priority in enumerate([0, 5, -1, 0, -1]):
        scheduler.submit(make_sequence(seq_id, [seq_id] * 3, priority=priority))
    assert [plan.sequences[0].seq_id for plan in drive(scheduler)] == [2, 4, 0, 3, 1]


def test_nobody_slips_past_a_sequence_that_waits_for_room() -> None:
    scheduler = make_scheduler(6, watermark=0.0)
    scheduler.submit(make_sequence(1, range(60), 4))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(100, 160), 4))
    scheduler.submit(make_sequence(3, range(3), 4))
    assert list(shares(step(scheduler))) == [1]
    drive(scheduler)


def test_a_whole_prompt_must_fit_to_be_admitted_not_its_first_chunk() -> None:
    scheduler = make_scheduler(10, max_batch_tokens=16, watermark=0.0)
    scheduler.submit(make_sequence(1, range(90), 1))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(100, 180), 1))
    assert list(shares(step(scheduler))) == [1]
    assert scheduler.pool.num_referenced == 6, "all blocks of the first prompt from the start"
    assert all(not plan.preemptions for plan in drive(scheduler))


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, True), (0.1, True), (0.2, False)])
def test_an_admission_leaves_the_watermark_available(watermark: float, admitted: bool) -> None:
    scheduler = make_scheduler(10, watermark=watermark)
    scheduler.submit(make_sequence(1, range(32), 4))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(100, 196), 4))
    step(scheduler)
    assert (scheduler.num_running == 2) is admitted, "2 + 1 + 6 of 10 blocks: one is left"


def test_a_lone_sequence_may_have_the_whole_pool() -> None:
    scheduler = make_scheduler(4, watermark=0.5)
    assert scheduler.max_context == 64
    scheduler.submit(make_sequence(1, range(60), 4))
    assert len(drive(scheduler)) == 4


def test_what_is_matched_and_idle_is_not_counted_twice_at_admission() -> None:
    """Six blocks are available, but four of them are the very ones it matched: three more do not fit."""
    scheduler = make_scheduler(8, watermark=0.0)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.submit(make_sequence(2, range(900, 930), 2))
    step(scheduler)
    scheduler.submit(make_sequence(3, range(112)))
    plan = step(scheduler)
    assert list(shares(plan)) == [2]
    assert scheduler.num_waiting == 1
    drive(scheduler)


@pytest.mark.parametrize(("prompt", "settings", "refusal"), [
    ([], {}, Refusal(RefusalReason.EMPTY_PROMPT, 1, 0)),
    ([1], {"max_new_tokens": 0}, Refusal(RefusalReason.NO_NEW_TOKENS, 1, 0)),
    ([1], {"max_new_tokens": -1}, Refusal(RefusalReason.NO_NEW_TOKENS, 1, -1)),
    ([1] * 60, {"max_new_tokens": 5}, Refusal(RefusalReason.TOO_LONG, 64, 65)),
    ([1] * 60, {"max_new_tokens": 4}, None),
])
def test_what_can_never_run_is_refused_with_the_reason(prompt: list[int], settings: dict[str, int],
                                                      refusal: Refusal | None) -> None:
    scheduler = make_scheduler(4)
    assert scheduler.submit(make_sequence(1, prompt, **settings)) == refusal
    assert scheduler.num_waiting == (refusal is None)


def test_the_queue_is_bounded() -> None:
    scheduler = make_scheduler(4, max_waiting=2)
    sequences = [make_sequence(seq_id, [seq_id]) for seq_id in range(3)]
    assert [scheduler.submit(sequence) for sequence in sequences] == [
        None, None, Refusal(RefusalReason.QUEUE_FULL, 2, 3)]
    drive(scheduler)
    assert scheduler.submit(sequences[2]) is None, "a refused one may come again"


@pytest.mark.parametrize(("configured", "effective"), [(None, 64), (50, 50), (5000, 64)])
def test_the_context_is_capped_to_what_the_pool_holds(configured: int | None, effective: int) -> None:
    assert make_scheduler(4, max_context=configured).max_context == effective


@pytest.mark.parametrize("settings", [
    {"max_batch_tokens": 0}, {"max_running": 0}, {"max_waiting": 0}, {"max_context": 1}, {"watermark": 1.0},
    {"watermark": -0.1}, {"max_preemptions": -1},
])
def test_a_setting_out_of_range_is_named(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        make_scheduler(4, **settings)


def test_the_cache_mode_and_the_pool_must_agree() -> None:
    with pytest.raises(ValueError, match="kv_cache"):
        Scheduler(make_pool(4), SchedulerConfig(kv_cache=KvCacheMode.DECODE))
