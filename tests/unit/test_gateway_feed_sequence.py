"""Sequence numbers against the plain rule: every batch once, in order, of one life."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.knowledge.event_feed import reachable_address
from gateway.knowledge.feed_sequence import FeedSequence, Verdict


@given(st.integers(0, 50), st.lists(st.integers(0, 60)))
def test_whatever_arrives_only_the_next_is_applied(barrier: int, arrivals: list[int]) -> None:
    sequence, applied = FeedSequence("life", barrier), []
    for seq in arrivals:
        verdict = sequence.judge(seq, "life")
        expected = barrier + len(applied)
        assert verdict is (Verdict.NEXT if seq == expected else
                           Verdict.GAP if seq > expected else Verdict.DUPLICATE)
        if verdict is Verdict.NEXT:
            sequence.applied(seq)
            applied.append(seq)
    assert applied == list(range(barrier, barrier + len(applied)))


@given(st.integers(0, 99))
def test_another_epoch_is_a_restart_whatever_its_number(seq: int) -> None:
    assert FeedSequence("life", 50).judge(seq, "another") is Verdict.RESTART


@pytest.mark.parametrize(("seq", "verdict"), [(4, Verdict.RESTART), (5, Verdict.NEXT), (6, Verdict.GAP)])
def test_without_epochs_a_number_going_backwards_is_a_restart(seq: int, verdict: Verdict) -> None:
    assert FeedSequence(None, 5).judge(seq, None) is verdict


def test_applying_out_of_order_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        FeedSequence("life", 5).applied(6)


@pytest.mark.parametrize(("address", "url", "expected"), [
    ("tcp://127.0.0.1:5557", "http://localhost:8100", "tcp://127.0.0.1:5557"),
    ("tcp://127.0.0.1:5557", "http://10.0.0.7:8100", "tcp://10.0.0.7:5557"),
    ("tcp://169.254.169.254:80", "http://10.0.0.7:8100", "tcp://10.0.0.7:80"),
    ("tcp://10.0.0.8:5557", "http://127.0.0.1:8100", "tcp://127.0.0.1:5557"),
    ("tcp://0.0.0.0:5557", "http://10.0.0.7:8100", "tcp://10.0.0.7:5557"),
    ("tcp://*:5557", "https://worker.example", "tcp://worker.example:5557"),
    ("tcp://[::]:5557", "http://[fd00::7]:8100", "tcp://[fd00::7]:5557"),
    ("ipc:///tmp/events", "http://10.0.0.7:8100", "ipc:///tmp/events"),
])
def test_a_socket_is_reached_where_the_worker_was_configured_to_be(address: str, url: str, expected: str) -> None:
    assert reachable_address(address, url) == expected


def test_the_last_batch_is_known_by_number_and_life() -> None:
    sequence = FeedSequence("one", 0)
    assert sequence.last_seq is None
    assert not sequence.is_last(0, "one")
    sequence = FeedSequence("one", 5)
    assert (sequence.last_seq, sequence.is_last(4, "one"), sequence.is_last(4, None)) == (4, True, True)
    assert not any((sequence.is_last(4, "two"), sequence.is_last(3, "one"), sequence.is_last(5, "one")))
