"""The load ledger against a list of open bookings: any order, any repetition, any number of restarts."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.load_ledger import NO_LOAD, Booking, LoadLedger, LoadView

ENDPOINTS = ("a", "b")
tokens = st.integers(0, 5000)


@dataclass
class OpenBooking:
    endpoint_id: str
    epoch: int
    prefill_tokens: int
    context_tokens: int
    handle: Booking
    streaming: bool = False
    released: bool = False


class LoadLedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger()
        self.epochs = dict.fromkeys(ENDPOINTS, 0)
        self.bookings: list[OpenBooking] = []

    @rule(endpoint_id=st.sampled_from(ENDPOINTS), prefill_tokens=tokens, context_tokens=tokens)
    def book(self, endpoint_id: str, prefill_tokens: int, context_tokens: int) -> None:
        epoch = self.epochs[endpoint_id]
        handle = self.ledger.book(endpoint_id, str(epoch), prefill_tokens=prefill_tokens,
                                  context_tokens=context_tokens)
        self.bookings.append(OpenBooking(endpoint_id, epoch, prefill_tokens, context_tokens, handle))

    @precondition(lambda self: self.bookings)
    @rule(data=st.data(), times=st.integers(1, 2))
    def first_byte(self, data: st.DataObject, times: int) -> None:
        booking = data.draw(st.sampled_from(self.bookings))
        for _ in range(times):
            booking.handle.prefill_done()
        booking.streaming = True

    @precondition(lambda self: self.bookings)
    @rule(data=st.data(), times=st.integers(1, 2))
    def end(self, data: st.DataObject, times: int) -> None:
        booking = data.draw(st.sampled_from(self.bookings))
        for _ in range(times):
            booking.handle.release()
        booking.released = True

    @rule(endpoint_id=st.sampled_from(ENDPOINTS), announced=st.booleans())
    def restart(self, endpoint_id: str, announced: bool) -> None:
        """Unannounced: the first booking of the new epoch tells the ledger."""
        if announced:
            self.ledger.forget(endpoint_id, str(self.epochs[endpoint_id]))
        self.epochs[endpoint_id] += 1
        if not announced:
            self.book(endpoint_id, 1, 1)

    @rule(endpoint_id=st.sampled_from(ENDPOINTS))
    def forget_an_earlier_epoch(self, endpoint_id: str) -> None:
        self.ledger.forget(endpoint_id, str(self.epochs[endpoint_id] - 1))

    @invariant()
    def load_is_that_of_the_open_bookings(self) -> None:
        for endpoint_id in ENDPOINTS:
            open_now = [booking for booking in self.bookings if booking.endpoint_id == endpoint_id
                        and booking.epoch == self.epochs[endpoint_id] and not booking.released]
            assert self.ledger.load(endpoint_id) == LoadView(
                len(open_now), sum(b.prefill_tokens for b in open_now if not b.streaming),
                sum(b.context_tokens for b in open_now if b.streaming))

    def teardown(self) -> None:
        for booking in reversed(self.bookings):
            booking.handle.release()
        assert all(self.ledger.load(endpoint_id) == NO_LOAD for endpoint_id in ENDPOINTS)


TestLoadLedgerMachine = LoadLedgerMachine.TestCase
TestLoadLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
