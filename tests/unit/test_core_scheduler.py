"""The scheduler, as stories: budgets, hits, modes, ends. Admission, preemption and twins have files of their own."""

from __future__ import annotations

import pytest

from tests.support.core_builders import (
    SAID,
    contents,
    drive,
    finish,
    make_scheduler,
    make_sequence,
    shares,
    step,
)
from worker.core.batch import FinishReason, SampledToken, SequenceUpdate, StepResult, TokenLogprobs
from worker.core.scheduler import KvCacheMode
from worker.core.step_limits import RECOVERY_STEPS
from worker.protocol.cache_events import AllBlocksCleared, BlockStored


def test_an_empty_scheduler_has_no_step() -> None:
    scheduler = make_scheduler(4)
    assert scheduler.schedule() is None
    assert scheduler.idle()
    assert scheduler.abort(7) is None


def test_one_prompt_from_submission_to_its_end() -> None:
    scheduler = make_scheduler(4)
    assert scheduler.submit(make_sequence(1, range(20), 2)) is None
    assert (scheduler.num_waiting, scheduler.waiting_prefill_tokens) == (1, 20)

    plan = scheduler.schedule()
    assert plan is not None
    (share,) = plan.sequences
    assert (share.start, share.token_ids, share.block_table) == (0, tuple(range(20)), (0, 1))
    assert (share.write_from, share.samples, plan.num_tokens) == (0, True, 20)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.running_prefill_tokens) == (1, 0, 20)
    logprobs = TokenLogprobs(-0.5)
    assert scheduler.commit(StepResult(plan.step_id, {1: SampledToken(5, logprobs)})) == [
        SequenceUpdate(1, (5,), (logprobs,), cached_tokens=0)]

    assert scheduler.decode_context_tokens == 21
    plan = scheduler.schedule()
    assert plan is not None
    assert (shares(plan), plan.sequences[0].token_ids, plan.sequences[0].write_from) == ({1: (20, 1)}, (5,), 16)
    assert finish(scheduler, plan) == [SequenceUpdate(1, (SAID,), finish_reason=FinishReason.LENGTH)]
    assert scheduler.idle()
    assert scheduler.pool.num_referenced == 0
    assert scheduler.counters.computed_positions == 21


def test_a_prompt_longer_than_the_budget_goes_in_chunks() -> None:
    scheduler = make_scheduler(8, max_batch_tokens=40)
    scheduler.submit(make_sequence(1, range(100)))
    plans = drive(scheduler)
    assert [shares(plan)[1] for plan in plans] == [(0, 40), (40, 40), (80, 20)]
    assert [plan.sequences[0].samples for plan in plans] == [False, False, True]
    assert [len(plan.sequences[0].block_table) for plan in plans] == [3, 5, 7], "covers the share, no more"
    assert [plan.sequences[0].write_from for plan in plans] == [0, 32, 80], "only full computed blocks are sealed"


def test_decodes_first_then_running_prefills_then_admissions() -> None:
    scheduler = make_scheduler(40, max_batch_tokens=32)
    scheduler.submit(make_sequence(1, range(100, 180), 2))
    step(scheduler)
    scheduler.submit(make_sequence(2, range(10), 8))
    step(scheduler)
    assert scheduler.num_running == 1, "the running prefill took the whole budget"
    plan = step(scheduler)
    assert shares(plan) == {1: (64, 16), 2: (0, 10)}
    scheduler.submit(make_sequence(3, range(200, 300), 2))
    plan = step(scheduler)
    assert shares(plan) == {1: (80, 1), 2: (10, 1), 3: (0, 30)}
    plan = step(scheduler)
    assert shares(plan) == {2: (11, 1), 3: (30, 31)}
    assert plan.num_tokens == 32


def test_no_more_run_than_the_budget_has_tokens() -> None:
    """Otherwise decodes alone could fill every step, and a prefill would never go on."""
    scheduler = make_scheduler(40, max_batch_tokens=3, max_running=64)
    for seq_id in range(5):
        scheduler.submit(make_sequence(seq_id, [seq_id], 4))
    step(scheduler)
    step(scheduler)
    assert scheduler.num_running == 3


# --- hits -------------------------------------------------------------------------------------------------------


def test_a_second_prompt_computes_only_what_differs() -> None:
    scheduler = make_scheduler(20)
    scheduler.submit(make_sequence(1, range(50)))
    drive(scheduler)
    second = make_sequence(2, [*range(40), 7, 7])
    scheduler.submit(second)
    assert scheduler.waiting_prefill_tokens == 10
    assert shares(step(scheduler)) == {2: (32, 10)}
    assert (second.num_cached_tokens, second.num_computed_positions) == (32, 10)
    assert (scheduler.counters.queried_tokens, scheduler.counters.hit_tokens) == (92, 32)


def test_a_full_hit_computes_one_position_and_writes_nothing_sealed() -> None:
    scheduler = make_scheduler(20)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    second = make_sequence(2, range(64), 3)
    scheduler.submit(second)
    assert scheduler.waiting_prefill_tokens == 1
    plan = scheduler.schedule()
    assert plan is not None
    (share,) = plan.sequences
    assert (share.start, share.token_ids, share.write_from, share.samples) == (63, (63,), 64, True)
    assert share.block_table == (0, 1, 2, 3), "all four are held"
    assert finish(scheduler, plan) == [SequenceUpdate(2, (SAID,), cached_tokens=63)]
    plan = scheduler.schedule()
    assert plan is not None
    (share,) = plan.sequences
    assert (share.start, share.write_from) == (64, 64)
    assert share.block_table[:4] == (0, 1, 2, 3)
    assert share.block_table[4] not in (0, 1, 2, 3), "it goes on in a block of its own"
    finish(scheduler, plan)
    drive(scheduler)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_cached_stays_below_the_prompt_at_every_length(length: int) -> None:
    scheduler = make_scheduler(20)
    for seq_id in range(2):
        sequence = make_sequence(seq_id, range(length))
        scheduler.submit(sequence)
        drive(scheduler)
    assert sequence.num_cached_tokens == min(length // 16 * 16, length - 1)
    assert sequence.num_computed_positions == length - sequence.num_cached_tokens


def test_generated_blocks_are_cached_for_the_next_turn_and_a_partial_one_is_not() -> None:
    scheduler = make_scheduler(20)
    first = make_sequence(1, range(20), 30)
    scheduler.submit(first)
    drive(scheduler)
    assert scheduler.pool.num_sealed == 3, "49 positions have K/V: three full blocks"
    turn = make_sequence(2, [*first.token_ids, 5, 6])
    scheduler.submit(turn)
    drive(scheduler)
    assert turn.num_cached_tokens == 48


def test_nothing_is_findable_before_it_is_computed() -> None:
    scheduler = make_scheduler(20)
    scheduler.submit(make_sequence(1, range(64)))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.pool.num_sealed == 0
    assert scheduler.take_events() == []
    finish(scheduler, plan)
    (stored,) = scheduler.take_events()
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 4


def test_reset_forgets_what_nobody_holds() -> None:
    scheduler = make_scheduler(20)
    scheduler.submit(make_sequence(1, range(64)))
    drive(scheduler)
    scheduler.take_events()
    scheduler.reset_cache()
    assert scheduler.take_events() == [AllBlocksCleared()]
    again = make_sequence(2, range(64))
    scheduler.submit(again)
    drive(scheduler)
    assert again.num_cached_tokens == 0


def test_the_step_says_who_needed_room_from_the_cache() -> None:
    scheduler = make_scheduler(6, watermark=0.0)
    scheduler.submit(make_sequence(1, range(64)))
    assert step(scheduler).evicted_for_seq_id is None
    scheduler.submit(make_sequence(2, range(100, 180)))
    plan = step(scheduler)
    assert (plan.num_blocks_evicted, plan.evicted_for_seq_id) == (3, 2)


# --- modes that are oracles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "num_positions"), [
    (KvCacheMode.FULL, 699), (KvCacheMode.DECODE, 699), (KvCacheMode.OFF, sum(range(500, 700)))])
@pytest.mark.parametrize("max_batch_tokens", [128, 1000])
def test_positions_computed_for_500_and_200_tokens(mode: KvCacheMode, num_positions: int,
                                                   max_batch_tokens: int) -> None:
    scheduler = make_scheduler(50, kv_cache=mode, max_batch_tokens=max_batch_tokens)
    sequence = make_sequence(1, range(500), 200)
    scheduler.submit(sequence)
    drive(scheduler, max_steps=1500)
    assert scheduler.counters.computed_positions == num_positions
    assert sequence.num_computed_positions == num_positions
    assert sequence.num_recomputed_tokens == 0
    assert sequence.num_output_tokens == 200


@pytest.mark.parametrize("mode", [KvCacheMode.DECODE, KvCacheMode.OFF])
def test_without_prefix_cache_nothing_is_shared_or_announced(mode: KvCacheMode) -> None:
    scheduler = make_scheduler(20, kv_cache=mode)
    for seq_id in range(2):
        scheduler.submit(make_sequence(seq_id, range(64), 2))
    plan = step(scheduler)
    assert shares(plan) == {0: (0, 64), 1: (0, 64)}
    assert all(share.write_from == 0 for share in plan.sequences)
    drive(scheduler)
    assert scheduler.take_events() == []
    assert (scheduler.counters.queried_tokens, scheduler.counters.hit_tokens) == (0, 0)
    assert scheduler.pool.num_free == 20


# --- ends -------------------------------------------------------------------------------------------------------


def test_an_abort_between_steps_frees_at_once() -> None:
    scheduler = make_scheduler(8, max_batch_tokens=32)
    scheduler.submit(make_sequence(1, range(100)))
    scheduler.submit(make_sequence(2, range(100, 110)))
    step(scheduler)
    assert scheduler.abort(2) == SequenceUpdate(2, finish_reason=FinishReason.ABORT)
    assert scheduler.abort(1) == SequenceUpdate(1, finish_reason=FinishReason.ABORT)
    assert scheduler.abort(1) is None
    scheduler.check_invariants()
    assert scheduler.idle()
    assert scheduler.pool.num_referenced == 0
    assert scheduler.pool.num_idle == 2, "what was computed of it stays cached"


def test_an_abort_within_a_step_waits_for_its_end() -> None:
    scheduler = make_scheduler(8)
    scheduler.submit(make_sequence(1, range(40), 5))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.abort(1) is None
    assert scheduler.pool.num_referenced == 3, "the runner may be writing there"
    assert finish(scheduler, plan) == [SequenceUpdate(1, finish_reason=FinishReason.ABORT)]
    assert scheduler.pool.num_referenced == 0
    assert scheduler.pool.num_idle == 2


def test_a_failed_step_ends_its_sequences_and_publishes_nothing() -> None:
    scheduler = make_scheduler(20, max_batch_tokens=32, max_running=2)
    for seq_id in range(4):
        scheduler.submit(make_sequence(seq_id, range(seq_id * 100, seq_id * 100 + 40), 5))
    step(scheduler)
    sealed_before = scheduler.pool.num_sealed
    plan = scheduler.schedule()
    assert plan is not None
    assert list(shares(plan)) == [0, 1]
    scheduler.abort(1)
    assert scheduler.commit(StepResult(plan.step_id, failed=frozenset({0, 1}))) == [
        SequenceUpdate(0, finish_reason=FinishReason.ERROR), SequenceUpdate(1, finish_reason=FinishReason.ABORT)]
    scheduler.check_invariants()
    assert scheduler.pool.num_sealed == sealed_before
    assert scheduler.pool.num_referenced == 0
    assert (scheduler.counters.failed_shares, scheduler.counters.computed_positions) == (2, 32)
    assert scheduler.pool.matchable(contents([*range(100, 140)])).block_ids == ()
    drive(scheduler)
    assert scheduler.counters.steps > 1


def test_a_failure_with_a_culprit_costs_the_others_nothing() -> None:
    scheduler = make_scheduler(20)
    for seq_id in range(3):
        scheduler.submit(make_sequence(seq_id, range(seq_id * 100, seq_id * 100 + 20), 5))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort(2)
    said = {1: SampledToken(SAID), 2: SampledToken(SAID)}
    assert scheduler.commit(StepResult(plan.step_id, said, failed=frozenset({0}))) == [
        SequenceUpdate(0, finish_reason=FinishReason.ERROR),
        SequenceUpdate(1, token_ids=(SAID,), cached_tokens=0),
        SequenceUpdate(2, finish_reason=FinishReason.ABORT)]
    scheduler.check_invariants()
    assert shares(step(scheduler)) == {1: (20, 1)}
    drive(scheduler)


def test_a_step_that_does_not_fit_into_memory_is_planned_anew_at_half_its_size() -> None:
    scheduler = make_scheduler(40, max_batch_tokens=64)
    for seq_id in range(4):
        scheduler.submit(make_sequence(seq_id, range(seq_id * 100, seq_id * 100 + 16), 5))
    plan = scheduler.schedule()
    assert plan is not None
    assert list(shares(plan)) == [0, 1, 2, 3]
    scheduler.abort(1)
    assert scheduler.shrink_step(plan) == [SequenceUpdate(1, finish_reason=FinishReason.ABORT)]
    scheduler.check_invariants()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1), "half of four may run; the last one waits"
    assert scheduler.pool.num_sealed == 0
    again = step(scheduler)
    assert shares(again) == {0: (0, 16), 2: (0, 16)}
    assert [(preemption.seq_id, preemption.for_seq_id) for preemption in again.preemptions] == [(3, 0)]
    drive(scheduler)
    assert scheduler.counters.shrunk_steps == 1


def test_who_was_preempted_for_want_of_memory_goes_on_when_those_left_are_aborted() -> None:
    scheduler = make_scheduler(40)
    for seq_id in (0, 1):
        scheduler.submit(make_sequence(seq_id, range(seq_id * 16, seq_id * 16 + 16), 2))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.shrink_step(plan)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.abort(0)
    again = step(scheduler)
    assert list(shares(again)) == [1], "nobody runs, so nobody is there to wait for"
    assert [preemption.seq_id for preemption in again.preemptions] == [1]
    drive(scheduler)


def test_a_step_that_never_fits_shrinks_to_one_position_and_grows_again() -> None:
    scheduler = make_scheduler(40, max_batch_tokens=64)
    scheduler.submit(make_sequence(0, range(200), 400))
    sizes = []
    while not sizes or sizes[-1] > 1:
        plan = scheduler.schedule()
        assert plan is not None
        sizes.append(plan.num_tokens)
        scheduler.shrink_step(plan)
    assert sizes == [64, 32, 16, 8, 4, 2, 1]
    assert scheduler.num_running == 1, "the only one is not preempted for itself"
    assert max(step(scheduler).num_tokens for _ in range(RECOVERY_STEPS)) == 1
    assert max(step(scheduler).num_tokens for _ in range(RECOVERY_STEPS)) == 2
    assert max(step(scheduler).num_tokens for _ in range(RECOVERY_STEPS)) == 4
    drive(scheduler)


def test_one_step_is_in_flight_at_a_time() -> None:
    scheduler = make_scheduler(8)
    scheduler.submit(make_sequence(1, range(4), 5))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="not the one in flight"):
        scheduler.commit(StepResult(plan.step_id + 1))
    finish(scheduler, plan)
    with pytest.raises(AssertionError, match="no step"):
        scheduler.shrink_step(plan)


def test_two_thousand_requests_return_to_the_baseline() -> None:
    scheduler = make_scheduler(12, 4, max_batch_tokens=64, max_waiting=4)
    for seq_id in range(2000):
        while scheduler.submit(make_sequence(seq_id, [seq_id % 7] * (1 + seq_id % 23), 1 + seq_id % 5)) is not None:
            plan = scheduler.schedule()
            assert plan is not None
            finish(scheduler, plan)
    drive(scheduler)
    assert scheduler.pool.num_referenced == 0
    assert scheduler.pool.num_free + scheduler.pool.num_idle == 12
