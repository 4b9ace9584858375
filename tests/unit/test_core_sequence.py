"""A sequence's own arithmetic: when it ends, where it begins, who pays; and the small structures around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core_builders import contents, make_scheme, make_sequence
from worker.core.batch import FinishReason
from worker.core.block_content import ContentChain
from worker.core.eviction import GhostList, LruOrder
from worker.core.sequence import StopRule
from worker.core.waiting_queue import WaitingQueue
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, block_hashes, pack_tokens

EOS, STOP, WORD = 2, 3, 9


@pytest.mark.parametrize(("rule", "num_outputs", "token", "reason"), [
    (StopRule(5), 1, WORD, None),
    (StopRule(5), 5, WORD, FinishReason.LENGTH),
    (StopRule(5, eos_token_ids=frozenset({EOS})), 1, EOS, FinishReason.STOP),
    (StopRule(5, eos_token_ids=frozenset({EOS})), 5, EOS, FinishReason.STOP),
    (StopRule(5, eos_token_ids=frozenset({EOS}), ignore_eos=True), 1, EOS, None),
    (StopRule(5, frozenset({STOP}), frozenset({EOS}), ignore_eos=True), 1, STOP, FinishReason.STOP),
    (StopRule(5, frozenset({STOP}), min_tokens=2), 1, STOP, None),
    (StopRule(5, frozenset({STOP}), min_tokens=2), 2, STOP, None),
    (StopRule(5, frozenset({STOP}), min_tokens=2), 3, STOP, FinishReason.STOP),
    (StopRule(2, frozenset({STOP}), min_tokens=9), 2, STOP, FinishReason.LENGTH),
])
def test_a_sequence_ends_where_its_rule_says(rule: StopRule, num_outputs: int, token: int,
                                             reason: FinishReason | None) -> None:
    assert rule.reason(num_outputs, token) is reason


def test_ending_tokens_are_banned_until_min_tokens_are_out() -> None:
    rule = {"stop_token_ids": frozenset({STOP}), "eos_token_ids": frozenset({EOS}), "min_tokens": 2}
    sequence = make_sequence(1, [1], 9, **rule)
    banned = []
    for _ in range(3):
        banned.append(sequence.banned_token_ids)
        sequence.append(WORD)
    assert banned == [{STOP, EOS}, {STOP, EOS}, frozenset()]


def test_prompt_and_output_are_told_apart() -> None:
    sequence = make_sequence(1, (1, 2, 3), 4)
    sequence.append(7)
    assert (sequence.prompt_token_ids, sequence.output_token_ids) == ([1, 2, 3], [7])
    assert (sequence.num_prompt_tokens, sequence.num_tokens, sequence.num_tokens_max) == (3, 4, 7)


@pytest.mark.parametrize(("length", "num_matched", "num_computed"), [(33, 0, 0), (33, 2, 32), (32, 2, 31), (1, 0, 0)])
def test_a_hit_leaves_at_least_one_position_to_compute(length: int, num_matched: int, num_computed: int) -> None:
    sequence = make_sequence(1, range(length))
    sequence.take_matched(range(num_matched), 16)
    assert (sequence.num_computed_tokens, sequence.num_sealed_blocks) == (num_computed, num_matched)


def test_only_positions_lost_to_a_preemption_count_as_recomputed_and_once() -> None:
    sequence = make_sequence(1, range(50))
    assert sequence.advance(40) == 0
    sequence.preempt()
    assert (sequence.num_preemptions, sequence.block_table, sequence.num_computed_tokens) == (1, [], 0)
    sequence.take_matched(range(1), 16)
    assert sequence.advance(10) == 10
    sequence.preempt()
    sequence.take_matched(range(1), 16)
    assert [sequence.advance(10), sequence.advance(20), sequence.advance(4)] == [10, 14, 0]
    assert (sequence.num_recomputed_tokens, sequence.num_computed_positions) == (34, 84)
    sequence.num_computed_tokens = 0  # what the mode without K/V does after every token
    assert sequence.advance(50) == 0


def test_a_chain_grows_with_its_tokens_and_knows_its_keys() -> None:
    tokens = list(range(40))
    keys = (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"s", 18), ExtraKey(ExtraKeyKind.LORA, b"l"))
    chain = ContentChain(make_scheme(16), keys)
    for token in tokens:
        chain.append((token,))
    assert chain.blocks == contents(tokens, extra_keys=keys)
    assert [block.block_hash for block in chain.blocks] == block_hashes(tokens, make_scheme(16), keys)
    assert [block.tokens for block in chain.blocks] == [pack_tokens(tokens[:16]), pack_tokens(tokens[16:32])]
    assert [block.extra_keys for block in chain.blocks] == [
        (ExtraKey(ExtraKeyKind.LORA, b"l", 0),), (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"s", 2),)]


def test_the_lru_order_is_the_order_of_release() -> None:
    order = LruOrder()
    for block_id in (3, 1, 2):
        order.add(block_id)
    order.remove(1)
    order.add(1)
    assert list(order) == [3, 2, 1]
    assert (order.pop_oldest(), len(order)) == (3, 2)
    with pytest.raises(AssertionError, match="idle already"):
        order.add(2)
    with pytest.raises(KeyError):
        order.remove(3)


def test_the_oldest_ghost_falls_out() -> None:
    ghosts = GhostList(2)
    for block_hash in (1, 2, 1, 3):
        ghosts.add(block_hash)
    assert len(ghosts) == 2
    assert [ghosts.discard(block_hash) for block_hash in (1, 2, 3, 3)] == [True, False, True, False]


def test_the_queue_is_ordered_by_priority_then_arrival_and_takes_back_in_place() -> None:
    queue = WaitingQueue(4)
    sequences = [make_sequence(seq_id, [1], priority=priority) for seq_id, priority in enumerate([0, 1, 0, -1])]
    for sequence in sequences:
        queue.push(sequence)
    assert queue.is_full
    assert [sequence.seq_id for sequence in queue] == [3, 0, 2, 1]
    queue.remove(sequences[0])
    assert not queue.is_full
    with pytest.raises((AssertionError, IndexError)):
        queue.remove(sequences[0])
    queue.requeue(sequences[0])
    assert [sequence.seq_id for sequence in queue] == [3, 0, 2, 1]
    with pytest.raises(AssertionError, match="is_full"):
        queue.push(make_sequence(9, [1]))


@pytest.mark.parametrize(("catch_up_tokens", "places"), [
    (0, [0, 3, 7]),      # 25 tokens each, against 10
    (30, [0, 1, 4]),     # two begin before it is level
    (100_000, [0, 1, 2])])
def test_a_tenant_with_a_long_line_stands_behind_itself(catch_up_tokens: int, places: list[int]) -> None:
    queue = WaitingQueue(600, catch_up_tokens=catch_up_tokens)
    flood = [make_sequence(seq_id, [1] * 10, tenant="flood") for seq_id in range(400)]
    for sequence in flood:
        queue.push(sequence)
    for sequence in flood[:100]:
        queue.admit(sequence)
    quiet = [make_sequence(1000 + number, [1] * 25, tenant="quiet") for number in range(3)]
    for sequence in quiet:
        queue.push(sequence)
    order = [sequence.seq_id for sequence in queue]
    assert [order.index(sequence.seq_id) for sequence in quiet] == places
    assert [seq_id for seq_id in order if seq_id < 1000] == list(range(100, 400))


def test_the_line_of_one_tenant_and_a_line_that_was_empty_are_first_come_first_served() -> None:
    queue = WaitingQueue(10)
    for seq_id in range(5):
        queue.push(make_sequence(seq_id, [1] * (9 - seq_id), tenant="a"))
    preempted = next(iter(queue))
    while (first := queue.first) is not None:
        queue.admit(first)
    for seq_id, tenant in enumerate("bab", 10):
        queue.push(make_sequence(seq_id, [1, 2], tenant=tenant))
    queue.requeue(preempted)
    assert [sequence.seq_id for sequence in queue] == [0, 10, 11, 12], "nobody is behind for what was served before"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 300))
def test_a_tenant_that_was_away_catches_up_and_then_takes_turns(sizes: list[int], catch_up_tokens: int) -> None:
    queue = WaitingQueue(1000, catch_up_tokens=catch_up_tokens)
    for seq_id in range(200):
        queue.push(make_sequence(seq_id, [1] * 10, tenant="flood"))
    for _ in range(100):
        queue.admit(next(iter(queue)))
    for number, size in enumerate(sizes):
        queue.push(make_sequence(1000 + number, [1] * size, tenant="quiet"))
    order, ahead = list(queue), 0
    for sequence in order[:1 + max(order.index(one) for one in order if one.tenant == "quiet")]:
        # Both are level when "quiet" is ahead by what it could catch up; the flood's last turn is the present.
        assert (sequence.tenant == "quiet") == (ahead < catch_up_tokens + 10), ahead
        ahead += sequence.num_tokens if sequence.tenant == "quiet" else -sequence.num_tokens


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=60))
def test_tenants_that_wait_get_tokens_in_turn(steps: list[tuple[str, int, bool]]) -> None:
    """While two tenants wait all along, what is admitted of them differs by no more than a request of each."""
    queue, num_tokens = WaitingQueue(1000), {"x": 0, "y": 0}
    sizes = {"x": 17, "y": 40}
    for seq_id in range(200):
        tenant = "xy"[seq_id % 2]
        queue.push(make_sequence(seq_id, [1] * sizes[tenant], tenant=tenant))
    for seq_id, (tenant, size, comes) in enumerate(steps, 1000):
        if comes:
            queue.push(make_sequence(seq_id, [1] * size, tenant=tenant))
        first = queue.first
        assert first is not None
        queue.admit(first)
        if first.tenant in sizes:
            num_tokens[first.tenant] += first.num_tokens
        assert abs(num_tokens["x"] - num_tokens["y"]) <= sum(sizes.values())
