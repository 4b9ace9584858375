"""A booking's life; what holds in any order is in tests/property/test_load_ledger_properties.py."""

from __future__ import annotations

import pytest

from gateway.routing.load_ledger import NO_LOAD, LoadLedger, LoadView


def test_a_request_from_booking_to_release() -> None:
    ledger = LoadLedger()
    booking = ledger.book("a", "1", prefill_tokens=200, context_tokens=1000)
    assert ledger.load("a") == LoadView(1, 200, 0)
    booking.prefill_done()
    assert ledger.load("a") == LoadView(1, 0, 1000)
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
    assert ledger.load("a") == LoadView(1, 7, 0)
    ledger.forget("a", "1")
    assert ledger.load("a") == LoadView(1, 7, 0)


def test_a_booking_of_a_new_epoch_replaces_the_account() -> None:
    ledger = LoadLedger()
    old = ledger.book("a", "1", prefill_tokens=200, context_tokens=1000)
    ledger.book("a", "2", prefill_tokens=7, context_tokens=9)
    old.release()
    assert ledger.load("a") == LoadView(1, 7, 0)


@pytest.mark.parametrize(("prefill_tokens", "context_tokens"), [(-1, 0), (0, -1)])
def test_a_booking_cannot_be_negative(prefill_tokens: int, context_tokens: int) -> None:
    ledger = LoadLedger()
    with pytest.raises(ValueError, match="cannot be negative"):
        ledger.book("a", "1", prefill_tokens=prefill_tokens, context_tokens=context_tokens)
    assert ledger.load("a") == NO_LOAD
