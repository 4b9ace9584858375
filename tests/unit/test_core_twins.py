"""Sequences that need what another is computing wait for it, and never for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.core_builders import drive, finish, make_scheduler, make_sequence, shares, step
from worker.core import block_content
from worker.core.batch import StepResult
from worker.core.twins import MAX_LEADERS
from worker.protocol.block_hash import ChainHasher, ExtraKey, ExtraKeyKind

SALT = (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"a"),)


def test_sixteen_identical_prompts_compute_at_most_1_1_of_one() -> None:
    scheduler = make_scheduler(400)
    prompt = list(range(2000))
    sequences = [make_sequence(seq_id, prompt) for seq_id in range(16)]
    for sequence in sequences:
        assert scheduler.submit(sequence) is None
    plans = drive(scheduler)
    assert scheduler.counters.computed_positions <= 1.1 * 2000
    assert scheduler.counters.computed_positions == 2000 + 15, "a full hit computes its last position again"
    assert [sequence.num_cached_tokens for sequence in sequences] == [0] + [1999] * 15
    assert [list(shares(plan)) for plan in plans[:4]] == [[0]] * 4
    assert list(shares(plans[4])) == list(range(1, 16)), "then all at once"


def test_choices_of_one_request_are_twins() -> None:
    scheduler = make_scheduler(100)
    for choice in range(4):
        scheduler.submit(make_sequence(choice, range(100), 5, choice=choice))
    drive(scheduler)
    prompts = 100 + 3 * (100 - 96)
    assert scheduler.counters.computed_positions == prompts + 4 * 4


def test_while_twins_wait_others_pass() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=64)
    scheduler.submit(make_sequence(1, range(100)))
    scheduler.submit(make_sequence(2, [*range(100), 7]))
    scheduler.submit(make_sequence(3, range(500, 510)))
    assert shares(step(scheduler)) == {1: (0, 64)}
    assert shares(step(scheduler)) == {1: (64, 36), 3: (0, 10)}
    assert scheduler.waiting_prefill_tokens == 5, "what the leader leaves to compute"
    assert shares(step(scheduler)) == {2: (96, 5)}


def test_only_what_is_shared_is_waited_for() -> None:
    scheduler = make_scheduler(100, max_batch_tokens=48)
    scheduler.submit(make_sequence(1, range(200)))
    scheduler.submit(make_sequence(2, [*range(32), *range(900, 910)], 3))
    assert shares(step(scheduler)) == {1: (0, 48)}
    scheduler.abort(1)
    assert shares(step(scheduler)) == {2: (32, 10)}


def test_a_partial_block_in_common_is_nothing_to_wait_for() -> None:
    scheduler = make_scheduler(100)
    scheduler.submit(make_sequence(1, range(15)))
    scheduler.submit(make_sequence(2, range(15)))
    assert shares(step(scheduler)) == {1: (0, 15), 2: (0, 15)}


def test_another_salt_is_another_prompt() -> None:
    scheduler = make_scheduler(100)
    scheduler.submit(make_sequence(1, range(64)))
    scheduler.submit(make_sequence(2, range(64), extra_keys=SALT))
    scheduler.submit(make_sequence(3, range(64), extra_keys=SALT))
    assert list(shares(step(scheduler))) == [1, 2]
    drive(scheduler)


@pytest.fixture
def constant_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant(ChainHasher):
        def append(self, token_ids: Sequence[int]) -> list[int]:
            return [7] * len(super().append(token_ids))

    monkeypatch.setattr(block_content, "ChainHasher", Constant)


def test_a_colliding_hash_is_no_twin(constant_hash: None) -> None:
    scheduler = make_scheduler(100)
    for seq_id, first in enumerate([0, 100, 0]):
        scheduler.submit(make_sequence(seq_id, range(first, first + 64)))
    assert list(shares(step(scheduler))) == [0, 1], "the third is a twin of the first, the second of nobody"
    drive(scheduler)


@pytest.mark.parametrize("leader_leaves", ["aborted", "aborted in flight", "failed"])
def test_when_the_leader_leaves_a_twin_goes_ahead_behind_what_is_there(leader_leaves: str) -> None:
    scheduler = make_scheduler(100, max_batch_tokens=40)
    for seq_id in range(3):
        scheduler.submit(make_sequence(seq_id, range(100)))
    step(scheduler)
    if leader_leaves == "aborted":
        scheduler.abort(0)
    else:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.abort(0)
        if leader_leaves == "failed":
            scheduler.commit(StepResult(plan.step_id, failed=frozenset(shares(plan))))
        else:
            finish(scheduler, plan)
    start = {"aborted": 32, "aborted in flight": 80, "failed": 32}[leader_leaves]
    assert shares(step(scheduler)) == {1: (start, min(40, 100 - start))}
    drive(scheduler)
    assert scheduler.pool.num_sealed == 6


def test_a_twin_of_text_being_generated_waits_a_step_at_most() -> None:
    scheduler = make_scheduler(100)
    first = make_sequence(1, range(15), 40)
    scheduler.submit(first)
    step(scheduler)
    scheduler.submit(make_sequence(2, [*first.token_ids, 1, 2, 3]))
    assert list(shares(step(scheduler))) == [1], "this step computes the block's last position"
    assert shares(step(scheduler)) == {1: (16, 1), 2: (16, 3)}
    drive(scheduler)


def test_equal_content_behind_another_parent_is_no_twin(constant_hash: None) -> None:
    scheduler = make_scheduler(100, max_batch_tokens=20)
    scheduler.submit(make_sequence(0, [8] * 16))
    step(scheduler)
    scheduler.submit(make_sequence(1, [7] * 16 + [1] * 16))
    assert shares(step(scheduler)) == {1: (0, 20)}
    scheduler.submit(make_sequence(2, [8] * 16 + [1] * 16))
    assert shares(step(scheduler)) == {1: (20, 12), 2: (16, 8)}
    drive(scheduler)


def test_nobody_follows_one_failing_leader_after_another_for_ever() -> None:
    scheduler = make_scheduler(100)
    scheduler.submit(make_sequence(0, range(64), priority=1))
    for seq_id in range(1, MAX_LEADERS + 1):
        scheduler.submit(make_sequence(seq_id, range(64)))
        plan = scheduler.schedule()
        assert plan is not None
        assert list(shares(plan)) == [seq_id]
        scheduler.commit(StepResult(plan.step_id, failed=frozenset(shares(plan))))
    scheduler.submit(make_sequence(99, range(64)))
    assert list(shares(step(scheduler))) == [99, 0]
    drive(scheduler)
