"""Waiting sequences hold what they will hit, and let go before they stand in anybody's way."""

from __future__ import annotations

from tests.support.core_builders import drive, make_scheduler, make_sequence, shares, step
from worker.core.waiting_room import CLAIMED_RATIO, PROTECTED_MAX


def test_a_waiting_sequence_keeps_what_it_will_hit_from_eviction() -> None:
    scheduler = make_scheduler(12, max_running=1, watermark=0.0)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.submit(make_sequence(2, range(500, 515), 80))
    step(scheduler)
    scheduler.submit(make_sequence(3, range(70)))
    drive(scheduler)
    assert scheduler.pool.num_evictions == 0
    assert scheduler.counters.hit_tokens == 64, "it needed six of the eight blocks that nobody had claimed"


def test_the_same_without_a_claim_would_evict() -> None:
    """The control: the sequence arrives after the room was needed."""
    scheduler = make_scheduler(8, max_running=1, watermark=0.0)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.submit(make_sequence(2, range(500, 515), 80))
    drive(scheduler)
    scheduler.submit(make_sequence(3, range(70)))
    drive(scheduler)
    assert scheduler.pool.num_evictions > 0
    assert scheduler.counters.hit_tokens < 64


def test_a_claim_is_given_up_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(8, max_running=1, watermark=0.0)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.submit(make_sequence(2, range(500, 515), 100))
    step(scheduler)
    scheduler.submit(make_sequence(3, range(70)))
    step(scheduler)
    assert scheduler.num_claimed_blocks == 4
    plans = drive(scheduler)
    assert not any(plan.preemptions for plan in plans)
    assert scheduler.counters.preemptions == 0


def test_those_behind_give_their_claims_up_for_the_first_in_the_queue() -> None:
    scheduler = make_scheduler(8, watermark=0.0)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.submit(make_sequence(2, range(500, 560), 2))
    step(scheduler)
    scheduler.submit(make_sequence(3, range(600, 696), 1))
    scheduler.submit(make_sequence(4, range(64), 1))
    step(scheduler)
    assert scheduler.num_claimed_blocks == 4, "the fourth, behind the third, which does not fit"
    assert shares(step(scheduler)) == {3: (0, 96)}
    drive(scheduler)


def test_a_follower_keeps_what_its_leader_computed_when_the_leader_leaves() -> None:
    """A long answer would have evicted the leader's blocks, had the follower not chased it."""
    scheduler = make_scheduler(16, max_batch_tokens=32, watermark=0.0)
    scheduler.submit(make_sequence(1, range(160)))
    scheduler.submit(make_sequence(2, range(160)))
    for num_claimed in (0, 2, 4):
        step(scheduler)
        assert scheduler.num_claimed_blocks == num_claimed, "what the steps before have sealed"
    scheduler.abort(1)
    assert scheduler.pool.num_referenced == 4
    assert shares(step(scheduler)) == {2: (96, 32)}, "the three steps' blocks, the last of them found idle"
    drive(scheduler)
    assert scheduler.counters.computed_positions == 160


def test_claims_end_with_the_wait() -> None:
    scheduler = make_scheduler(20, max_batch_tokens=32)
    for seq_id in range(3):
        scheduler.submit(make_sequence(seq_id, range(100)))
    step(scheduler)
    step(scheduler)
    assert scheduler.num_claimed_blocks == 2
    scheduler.abort(1)
    scheduler.abort(2)
    assert scheduler.num_claimed_blocks == 0
    scheduler.check_invariants()
    drive(scheduler)
    assert scheduler.pool.num_referenced == 0


def test_claims_are_bounded_by_the_pool_and_by_the_queue() -> None:
    scheduler = make_scheduler(100, max_running=1)
    num_prompts = PROTECTED_MAX + 4
    for seq_id in range(num_prompts):
        scheduler.submit(make_sequence(seq_id, range(100 * seq_id, 100 * seq_id + 64)))
    drive(scheduler)
    scheduler.submit(make_sequence(90, range(9000, 9010), 3))
    for seq_id in range(num_prompts):
        scheduler.submit(make_sequence(100 + seq_id, range(100 * seq_id, 100 * seq_id + 64)))
    step(scheduler)
    assert 0 < scheduler.num_claimed_blocks <= CLAIMED_RATIO * 100
    drive(scheduler)


def test_a_reset_forgets_what_is_claimed_too() -> None:
    scheduler = make_scheduler(12, max_running=1)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.submit(make_sequence(2, range(500, 515), 3))
    scheduler.submit(make_sequence(3, range(64)))
    step(scheduler)
    assert scheduler.num_claimed_blocks == 4
    scheduler.reset_cache()
    assert scheduler.pool.num_sealed == 0
    drive(scheduler)


def test_nobody_waits_for_a_less_urgent_leader_which_then_follows() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=64)
    slow = make_sequence(1, range(200), priority=5)
    scheduler.submit(slow)
    step(scheduler)
    scheduler.submit(make_sequence(2, range(200)))
    assert shares(step(scheduler)) == {2: (64, 64)}, "behind what the first has sealed, and before it"
    assert shares(step(scheduler)) == {2: (128, 64)}
    assert shares(step(scheduler)) == {2: (192, 8), 1: (192, 8)}, "no full block is left to share"
    drive(scheduler)
    assert slow.num_cached_tokens == 128
    assert scheduler.counters.computed_positions == 208


def test_a_running_sequence_takes_over_what_another_sealed() -> None:
    """Both run, since the second was more urgent; the first leaves it the rest and pays for nothing twice."""
    scheduler = make_scheduler(100, max_batch_tokens=64)
    first = make_sequence(1, range(300), priority=5)
    scheduler.submit(first)
    step(scheduler)
    scheduler.submit(make_sequence(2, [*range(900, 930)], 1))
    scheduler.submit(make_sequence(3, [*range(300)], priority=-1))
    drive(scheduler)
    assert scheduler.counters.computed_positions <= 300 + 30 + 2 * 64
    assert first.num_cached_tokens is not None
    assert first.num_cached_tokens + first.num_computed_positions == 300
