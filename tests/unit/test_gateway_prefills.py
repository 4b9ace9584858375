"""Prompts that count as computed when they should have been, with one timer for all."""

from __future__ import annotations

import asyncio
import time

from gateway.routing.load_ledger import Booking, LoadLedger
from gateway.server.prefills import ENDED_MAX, Prefills


def booked(ledger: LoadLedger) -> Booking:
    return ledger.book("a", "1", prefill_tokens=100, context_tokens=200)


async def test_a_decision_finds_what_is_due_computed_and_nothing_else() -> None:
    prefills, ledger, now = Prefills(), LoadLedger(), time.monotonic()
    for due_at in (now + 200.0, now + 100.0, now + 300.0):
        prefills.expect(booked(ledger), due_at)
    prefills.tick(now + 99.0)
    assert ledger.load("a").queued_prefill_tokens == 300
    prefills.tick(now + 200.0)
    assert (ledger.load("a").queued_prefill_tokens, ledger.load("a").num_decoding, len(prefills)) == (100, 2, 1)


async def test_without_any_decision_a_timer_looks() -> None:
    prefills, ledger = Prefills(), LoadLedger()
    prefills.expect(booked(ledger), time.monotonic())
    while len(prefills):
        await asyncio.to_thread(time.sleep, 0.001)
    assert ledger.load("a").queued_prefill_tokens == 0


async def test_what_ended_early_does_not_stay_for_long() -> None:
    prefills, ledger, far = Prefills(), LoadLedger(), time.monotonic() + 1e6
    waiting = booked(ledger)
    prefills.expect(waiting, far)
    for _ in range(3 * ENDED_MAX):
        booking = booked(ledger)
        prefills.expect(booking, far)
        booking.release()
        prefills.ended()
        assert len(prefills) <= 2 * ENDED_MAX + 3
    prefills.tick(far)
    assert (ledger.load("a").num_inflight, ledger.load("a").queued_prefill_tokens) == (1, 0)


async def test_when_all_have_ended_nothing_is_left_to_look_at() -> None:
    prefills, ledger, far = Prefills(), LoadLedger(), time.monotonic() + 1e6
    bookings = [booked(ledger) for _ in range(3)]
    for number, booking in enumerate(bookings):
        prefills.expect(booking, far + number)
    for number in (1, 2, 0):
        bookings[number].release()
        prefills.ended()
    assert len(prefills) == 0
    later = booked(ledger)
    prefills.expect(later, time.monotonic())
    while len(prefills):
        await asyncio.to_thread(time.sleep, 0.001)
    assert ledger.load("a").queued_prefill_tokens == 0
