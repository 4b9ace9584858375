"""A booking's life; what holds in any order is in tests/property/test_load_ledger_properties.py."""

from __future__ import annotations

import pytest

from gateway.routing.load_ledger import NO_LOAD, Booking, Footprint, LoadLedger, LoadView
from gateway.routing.memory_wait import Stream


def test_a_request_from_booking_to_release() -> None:
    ledger = LoadLedger()
    booking = ledger.book("a", "1", prefill_tokens=200, context_tokens=1000)
    assert ledger.load("a") == LoadView(1, 200, 0, 0, 200)
    booking.prefill_done()
    assert ledger.load("a") == LoadView(1, 0, 1000, 1, 200)
    booking.release()
    assert ledger.load("a") == NO_LOAD
    assert booking.released
    assert ledger.load("never heard of") == NO_LOAD


def test_a_request_that_ends_before_its_first_byte_leaves_nothing() -> None:
    ledger = LoadLedger()
    with pytest.raises(ConnectionError), ledger.book("a", "1", prefill_tokens=200, context_tokens=1000):
        raise ConnectionError
    assert ledger.loads() == {"a": NO_LOAD}


def test_bookings_of_a_forgotten_epoch_are_harmless() -> None:
    ledger = LoadLedger()
    old = ledger.book("a", "1", prefill_tokens=200, context_tokens=1000)
    ledger.forget("a", "1")
    assert ledger.load("a") == NO_LOAD
    ledger.book("a", "2", prefill_tokens=7, context_tokens=9)
    old.prefill_done()
    old.release()
    assert ledger.load("a") == LoadView(1, 7, 0, 0, 7)
    ledger.forget("a", "1")
    assert ledger.load("a") == LoadView(1, 7, 0, 0, 7)


def test_a_booking_of_a_new_epoch_replaces_the_account() -> None:
    ledger = LoadLedger()
    old = ledger.book("a", "1", prefill_tokens=200, context_tokens=1000)
    ledger.book("a", "2", prefill_tokens=7, context_tokens=9)
    old.release()
    assert ledger.load("a") == LoadView(1, 7, 0, 0, 7)


@pytest.mark.parametrize(("prefill_tokens", "context_tokens"), [(-1, 0), (0, -1)])
def test_a_booking_cannot_be_negative(prefill_tokens: int, context_tokens: int) -> None:
    ledger = LoadLedger()
    with pytest.raises(ValueError, match="cannot be negative"):
        ledger.book("a", "1", prefill_tokens=prefill_tokens, context_tokens=context_tokens)
    assert ledger.load("a") == NO_LOAD


def book(ledger: LoadLedger, chain: list[int], matched_blocks: int, at: float = 0.0) -> Booking:
    uncached = 16 * (len(chain) - matched_blocks)
    return ledger.book("a", "1", prefill_tokens=uncached, context_tokens=16 * len(chain),
                       footprint=Footprint(chain, matched_blocks, 16 * matched_blocks, 20, at))


def test_what_several_match_is_held_once_and_by_the_last_of_them() -> None:
    ledger = LoadLedger()
    first, second, third = (book(ledger, [1, 2, 3, own], 3) for own in (10, 11, 12))
    assert ledger.load("a").held_tokens == 48 + 3 * (16 + 10)
    assert [booking.found_held for booking in (first, second, third)] == [False, True, True]
    first.release()
    assert ledger.load("a").held_tokens == 48 + 2 * 26
    third.release()
    assert ledger.load("a").held_tokens == 48 + 26
    second.release()
    assert ledger.load("a") == NO_LOAD


def test_a_match_in_what_another_computes_needs_no_memory_of_its_own() -> None:
    ledger = LoadLedger()
    book(ledger, [1, 2, 3], 0)
    assert book(ledger, [1, 2, 9], 2).found_held
    assert ledger.load("a").held_tokens == 48 + 16 + 2 * 10
    assert not book(ledger, [7, 8, 9], 2).found_held
    assert ledger.load("b") == NO_LOAD


def test_what_one_computed_stays_held_while_others_use_it() -> None:
    """A burst of siblings: the first computes what they share, and its answer is not the last to end."""
    ledger = LoadLedger()
    first, second, third = book(ledger, [1, 2, 3, 4], 0), book(ledger, [1, 2, 3, 8], 3), book(ledger, [1, 2, 9], 2)
    held = [(one.held_tokens, one.inherited_tokens) for one in ledger.streams("a")]
    assert held == [(26, 0), (26, 16), (26, 32)], "the third is thought to end last"
    first.release()
    assert ledger.load("a").held_tokens == 48 + 26 + 26
    assert [(one.held_tokens, one.inherited_tokens) for one in ledger.streams("a")] == [(42, 0), (26, 32)]
    second.release()
    assert ledger.load("a").held_tokens == 32 + 26, "the third does not go so far"
    third.release()
    assert ledger.load("a") == NO_LOAD


def test_the_share_of_matches_that_others_hold_is_learned() -> None:
    ledger = LoadLedger()
    for _ in range(100):
        book(ledger, [1, 2, 3], 3).release()
    assert ledger.shared_ratio < 0.01
    for _ in range(100):
        book(ledger, [1, 2, 3], 3)
    assert ledger.shared_ratio > 0.9


def test_streams_are_told_in_the_order_of_booking_with_what_they_alone_hold() -> None:
    ledger = LoadLedger()
    assert ledger.streams("a") == ()
    alone = book(ledger, [1, 2, 3], 2, at=1.0)
    assert ledger.streams("a") == [Stream(26 + 32, 16, 20, None, [1, 2, 3])]
    alone.prefill_done(1.5)
    book(ledger, [1, 2, 4], 2, at=2.0)
    assert [stream.held_tokens for stream in ledger.streams("a")] == [26, 26], "another needs the prefix too"
    assert [stream.began_at for stream in ledger.streams("a")] == [1.5, None]
    alone.release()
    assert [stream.held_tokens for stream in ledger.streams("a")] == [58]
