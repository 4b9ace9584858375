"""The load ledger against a list of open bookings: any order, any repetition, any number of restarts."""

from __future__ import annotations

from dataclasses import dataclass
from operator import eq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.load_ledger import NO_LOAD, Booking, Footprint, LoadLedger, LoadView

ENDPOINTS = ("a", "b")
tokens = st.integers(0, 5000)


@dataclass
class OpenBooking:
    endpoint_id: str
    epoch: int
    prefill_tokens: int
    context_tokens: int
    handle: Booking
    chain: list[int]
    matched_blocks: int
    streaming: bool = False
    released: bool = False


class LoadLedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger()
        self.epochs = dict.fromkeys(ENDPOINTS, 0)
        self.bookings: list[OpenBooking] = []

    @rule(endpoint_id=st.sampled_from(ENDPOINTS), prefill_tokens=tokens, context_tokens=tokens,
          prefix=st.sampled_from([1, 2]), matches=st.booleans(), at=st.integers(0, 100))
    def book(self, endpoint_id: str, prefill_tokens: int, context_tokens: int, prefix: int = 1,
             matches: bool = False, at: int = 0) -> None:
        epoch = self.epochs[endpoint_id]
        chain, matched_blocks = [prefix, 10 * prefix, 1000 + len(self.bookings)], 2 * matches
        handle = self.ledger.book(endpoint_id, str(epoch), prefill_tokens=prefill_tokens,
                                  context_tokens=context_tokens,
                                  footprint=Footprint(chain, matched_blocks, 16 * matched_blocks, 8, float(at)))
        self.bookings.append(OpenBooking(endpoint_id, epoch, prefill_tokens, context_tokens, handle, chain,
                                         matched_blocks))

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
            # A prefix that one of them found in the cache is held once while any of its sharers is there; of one that
            # somebody computes himself and others match, what they match stays when he has ended.
            load = self.ledger.load(endpoint_id)
            private = sum(b.prefill_tokens + 4 for b in open_now)
            left_tokens = sum(b.prefill_tokens for b in self.bookings if b.endpoint_id == endpoint_id and b.released)
            prefixes = {b.chain[0] for b in open_now}
            assert load == LoadView(
                len(open_now), sum(b.prefill_tokens for b in open_now if not b.streaming),
                sum(b.context_tokens for b in open_now if b.streaming), sum(b.streaming for b in open_now),
                load.held_tokens)
            streams = self.ledger.streams(endpoint_id)
            assert [(one.prefill_tokens, one.began_at is not None, one.chain) for one in streams] == [
                (b.prefill_tokens, b.streaming, b.chain) for b in open_now]
            assert all(one.held_tokens >= 0 and one.inherited_tokens >= 0 for one in streams)
            assert sum(one.held_tokens + one.inherited_tokens for one in streams) == load.held_tokens
            assert private <= load.held_tokens <= private + left_tokens + 32 * len(prefixes)
            for prefix in prefixes:
                if all(b.matched_blocks for b in self.bookings if b.chain[0] == prefix):
                    assert (load.held_tokens - private) // 32 >= 1

    def teardown(self) -> None:
        for booking in reversed(self.bookings):
            booking.handle.release()
        assert all(self.ledger.load(endpoint_id) == NO_LOAD for endpoint_id in ENDPOINTS)


TestLoadLedgerMachine = LoadLedgerMachine.TestCase
TestLoadLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class LongLoadLedgerMachine(LoadLedgerMachine):
    """250 examples of 40 steps: ten thousand."""


TestTenThousandSteps = pytest.mark.slow(LongLoadLedgerMachine.TestCase)
TestTenThousandSteps.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@given(st.data())
def test_what_is_held_are_the_blocks_that_anybody_uses(data: st.DataObject) -> None:
    """Whoever matches has all that is in use there of his prompt, computed or found, maybe more from the cache."""
    ledger = LoadLedger()
    open_now: list[tuple[tuple[int, ...], Booking]] = []
    for bits in data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=12)):
        chain = tuple(hash((*bits[:end],)) for end in range(1, len(bits) + 1))
        in_use = max((sum(map(eq, chain, other)) for other, _ in open_now), default=0)
        matched = data.draw(st.integers(in_use, len(chain)))
        booking = ledger.book("a", "1", prefill_tokens=16 * (len(chain) - matched), context_tokens=16 * len(chain),
                              footprint=Footprint(chain, matched, 16 * matched))
        open_now.append((chain, booking))
        while open_now and data.draw(st.booleans()):
            open_now.pop(data.draw(st.integers(0, len(open_now) - 1)))[1].release()
            streams = ledger.streams("a")
            used = {block for other, _ in open_now for block in other}
            assert ledger.load("a").held_tokens == 16 * len(used)
            assert sum(one.held_tokens + one.inherited_tokens for one in streams) == 16 * len(used)
            for at, one in enumerate(streams):   # booked last, ends last
                later = {block for other, _ in open_now[at + 1:] for block in other}
                assert one.held_tokens + one.inherited_tokens >= 16 * len(set(one.chain) - later)
