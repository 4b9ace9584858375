"""Preemption by recomputation: who gives way, for whom, what it costs, and that it ends."""

from __future__ import annotations

from tests.support.core_builders import drive, finish, make_scheduler, make_sequence, shares, step
from worker.core.batch import Preemption, StepPlan
from worker.core.scheduler import KvCacheMode, Scheduler


def run_to_preemption(scheduler: Scheduler) -> StepPlan:
    while True:
        plan = step(scheduler)
        if plan.preemptions:
            return plan


def test_whose_blocks_all_stay_cached_comes_back_for_nothing() -> None:
    """The first takes the last block; the second, last in rank, lets go and finds all 48 positions again."""
    scheduler = make_scheduler(7, watermark=0.0)
    first, second = make_sequence(1, range(40), 24), make_sequence(2, range(100, 140), 30)
    scheduler.submit(first)
    scheduler.submit(second)
    plan = run_to_preemption(scheduler)
    assert plan.preemptions == (Preemption(seq_id=2, for_seq_id=2, num_blocks_freed=3, num_tokens_lost=48),)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.waiting_prefill_tokens) == (1, 1, 1)
    drive(scheduler)
    assert (first.num_preemptions, second.num_preemptions, scheduler.counters.preemptions) == (0, 1, 1)
    assert (second.num_output_tokens, second.num_recomputed_tokens) == (30, 0)
    assert scheduler.counters.computed_positions == (40 + 23) + (40 + 29)
    assert scheduler.counters.queried_tokens == 80, "a prompt counts once, however often it is admitted"


def test_the_account_of_a_preemption_exactly() -> None:
    """Blocks of 4. At the preemption the victim has 9 positions, 8 of them in sealed blocks; one is taken from it."""
    scheduler = make_scheduler(6, 4, watermark=0.0)
    first, second = make_sequence(1, [1] * 8, 8), make_sequence(2, [2] * 8, 8)
    scheduler.submit(first)
    scheduler.submit(second)
    assert shares(step(scheduler)) == {1: (0, 8), 2: (0, 8)}
    for position in range(8, 12):
        assert shares(step(scheduler)) == {1: (position, 1), 2: (position, 1)}
    plan = step(scheduler)
    assert plan.preemptions == (Preemption(seq_id=2, for_seq_id=1, num_blocks_freed=3, num_tokens_lost=12),)
    assert shares(plan) == {1: (12, 1)}
    assert (plan.num_blocks_evicted, plan.evicted_for_seq_id) == (1, 1), "the victim's own tail was taken"
    assert scheduler.waiting_prefill_tokens == 13 - 12
    while not scheduler.idle():
        plan = step(scheduler)
        if 2 in shares(plan):
            break
    assert shares(plan) == {2: (8, 5)}, "two of its three sealed blocks are found again"
    assert (second.num_recomputed_tokens, scheduler.counters.recomputed_preempted_tokens) == (4, 4)
    assert scheduler.pool.num_recomputed_evicted_tokens == 0, "one cause, one counter"
    drive(scheduler)
    assert second.num_recomputed_tokens == 4
    assert second.num_computed_positions == 15 + 4


def test_the_least_urgent_gives_way_whenever_it_was_admitted() -> None:
    scheduler = make_scheduler(9, 4, watermark=0.0)
    scheduler.submit(make_sequence(1, [1] * 8, 12, priority=5))
    step(scheduler)
    for seq_id in (2, 3):
        scheduler.submit(make_sequence(seq_id, [seq_id] * 8, 12))
    assert run_to_preemption(scheduler).preemptions[0].seq_id == 1


def test_one_never_preempts_somebody_ahead_of_itself() -> None:
    """The last in rank needs a block first: it gives its own up."""
    scheduler = make_scheduler(5, 4, watermark=0.0)
    scheduler.submit(make_sequence(1, [1] * 9, 4))
    scheduler.submit(make_sequence(2, [2] * 8, 8))
    step(scheduler)
    (preemption,) = step(scheduler).preemptions
    assert (preemption.seq_id, preemption.for_seq_id) == (2, 2)
    drive(scheduler)


def test_a_decode_never_takes_the_blocks_of_a_more_urgent_prefill() -> None:
    """The decode comes first in the step, but not in rank."""
    scheduler = make_scheduler(8, 4, max_batch_tokens=5, watermark=0.0)
    scheduler.submit(make_sequence(2, [2] * 4, 12, priority=5))
    step(scheduler)
    scheduler.submit(make_sequence(1, range(100, 124), 4))
    plan = run_to_preemption(scheduler)
    assert [(preemption.seq_id, preemption.for_seq_id) for preemption in plan.preemptions] == [(2, 2)]
    assert shares(plan) == {1: (16, 5)}
    drive(scheduler)


def test_who_has_a_share_in_the_step_is_safe_in_it() -> None:
    """With the cache off a sequence may need a block after a less urgent one got its share."""
    scheduler = make_scheduler(3, 4, kv_cache=KvCacheMode.OFF, max_batch_tokens=11, watermark=0.0)
    scheduler.submit(make_sequence(1, [1] * 4, 8))
    scheduler.submit(make_sequence(2, [2] * 8, 4))
    assert shares(step(scheduler)) == {1: (0, 4), 2: (0, 7)}
    plan = step(scheduler)
    assert shares(plan) == {2: (7, 1)}
    assert [(preemption.seq_id, preemption.for_seq_id) for preemption in plan.preemptions] == [(1, 1)]
    drive(scheduler)


def test_an_admission_never_preempts() -> None:
    scheduler = make_scheduler(6, watermark=0.0)
    scheduler.submit(make_sequence(1, range(80), 10, priority=9))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(200, 280), 10, priority=-9))
    assert not step(scheduler).preemptions
    assert scheduler.num_running == 1
    assert all(not plan.preemptions for plan in drive(scheduler))


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(7, 4, watermark=0.0)
    scheduler.submit(make_sequence(1, [1] * 8, 12))
    scheduler.submit(make_sequence(2, [2] * 8, 12))
    step(scheduler)
    scheduler.submit(make_sequence(3, [3] * 11, 1))
    plan = run_to_preemption(scheduler)
    assert list(shares(plan)) == [1]
    drive(scheduler)


def test_a_victim_that_would_free_nothing_is_passed_over() -> None:
    """The third, a full hit, shares every block with the first: its going would gain nothing."""
    scheduler = make_scheduler(8, 4, watermark=0.0)
    scheduler.submit(make_sequence(1, [1] * 16, 9))
    scheduler.submit(make_sequence(2, [2] * 8, 12))
    for _ in range(4):
        step(scheduler)
    scheduler.submit(make_sequence(3, [1] * 16, 9))
    assert shares(step(scheduler)) == {1: (19, 1), 2: (11, 1), 3: (15, 1)}
    plan = step(scheduler)
    assert plan.preemptions == (Preemption(seq_id=2, for_seq_id=1, num_blocks_freed=3, num_tokens_lost=12),)
    assert shares(plan) == {1: (20, 1), 3: (16, 1)}
    drive(scheduler)


def test_preemptions_per_sequence_are_bounded_and_all_come_to_an_end() -> None:
    for limit in (0, 1, 2):
        scheduler = make_scheduler(8, 4, max_preemptions=limit, watermark=0.0)
        sequences = [make_sequence(seq_id, [seq_id] * 6, 20) for seq_id in range(6)]
        for sequence in sequences:
            scheduler.submit(sequence)
        drive(scheduler)
        assert all(sequence.num_output_tokens == 20 for sequence in sequences)
        assert max(sequence.num_preemptions for sequence in sequences) <= limit


def test_who_was_preempted_often_enough_owns_its_blocks_for_good() -> None:
    """The second comes back with all 8 blocks it can ever need; the first, though ahead of it, gives way then."""
    scheduler = make_scheduler(12, 4, max_preemptions=1, watermark=0.0)
    scheduler.submit(make_sequence(0, [0] * 20, 28, priority=-1))
    scheduler.submit(make_sequence(1, [1] * 8, 24))
    scheduler.submit(make_sequence(2, [2] * 8, 24))
    assert [preemption.seq_id for preemption in run_to_preemption(scheduler).preemptions] == [2]
    scheduler.abort(0)
    assert list(shares(step(scheduler))) == [1, 2]
    assert [(p.seq_id, p.for_seq_id) for p in run_to_preemption(scheduler).preemptions] == [(1, 1)]
    assert scheduler.num_running == 1
    drive(scheduler)


def test_two_that_cannot_both_fit_do_not_thrash() -> None:
    scheduler = make_scheduler(4, 4, watermark=0.0)
    for seq_id in range(2):
        scheduler.submit(make_sequence(seq_id, [seq_id] * 4, 12))
    plans = drive(scheduler, max_steps=60)
    assert scheduler.counters.preemptions <= 2
    assert len(plans) <= 4 + 2 * 12


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals() -> None:
    scheduler = make_scheduler(8, 4, watermark=0.0)
    for seq_id in range(3):
        scheduler.submit(make_sequence(seq_id, [seq_id] * 8, 12))
    victim = run_to_preemption(scheduler).preemptions[0].seq_id
    scheduler.submit(make_sequence(9, [9] * 8, 12))
    first_seen: list[int] = []
    for plan in drive(scheduler):
        first_seen += [seq_id for seq_id in shares(plan) if seq_id not in first_seen]
    assert first_seen.index(victim) < first_seen.index(9)


def test_a_sequence_preempted_in_its_prefill_is_counted_right() -> None:
    scheduler = make_scheduler(9, 4, max_batch_tokens=5, watermark=0.0)
    scheduler.submit(make_sequence(1, [1] * 4, 20))
    step(scheduler)
    second = make_sequence(2, range(100, 128), 1)
    scheduler.submit(second)
    preempted = False
    while not scheduler.idle():
        plan = scheduler.schedule()
        assert plan is not None
        preempted |= bool(plan.preemptions)
        finish(scheduler, plan)
        scheduler.check_invariants()
    assert second.num_computed_positions == 28 + second.num_recomputed_tokens
    assert preempted == (second.num_preemptions > 0)
