"""Several processes' ledgers in one segment against a list of open bookings: sums, restarts of workers, kills."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.load_ledger import Booking, LoadView
from gateway.shared.row_table import RowTable
from gateway.shared.segment import RowState, Segment, new_segment_file
from gateway.shared.shared_ledger import OTHERS_FRESH_S, SharedAccount, SharedLedger

ENDPOINTS, ROWS = ("a", "b", "c"), 3
tokens = st.integers(0, 5000)
rows, endpoints = st.integers(0, ROWS - 1), st.sampled_from(ENDPOINTS)


@dataclass
class Open:
    row: int
    endpoint_id: str
    epoch: int
    prefill_tokens: int
    context_tokens: int
    handle: Booking
    streaming: bool = False


class SharedLedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment(new_segment_file(ROWS))
        self.epochs = dict.fromkeys(ENDPOINTS, 0)
        self.open: list[Open] = []
        self.ledgers: list[SharedLedger] = []
        for row in range(ROWS):
            self.ledgers.append(self._begin(row))

    def teardown(self) -> None:
        self.segment.close()

    def _begin(self, row: int) -> SharedLedger:
        self.segment.begin_row(row, row)
        self.segment.set_state(row, RowState.SERVING)
        ledger = SharedLedger(RowTable(self.segment, self.segment.layout.endpoints, row))
        for endpoint_id, epoch in self.epochs.items():
            ledger.begin(endpoint_id, str(epoch))
        return ledger

    @rule(row=rows, endpoint_id=endpoints, prefill_tokens=tokens, context_tokens=tokens)
    def book(self, row: int, endpoint_id: str, prefill_tokens: int, context_tokens: int) -> None:
        epoch = self.epochs[endpoint_id]
        handle = self.ledgers[row].book(endpoint_id, str(epoch), prefill_tokens=prefill_tokens,
                                        context_tokens=context_tokens)
        self.open.append(Open(row, endpoint_id, epoch, prefill_tokens, context_tokens, handle))

    @rule(row=rows, endpoint_id=endpoints, limit=st.integers(0, 6))
    def book_within_limit(self, row: int, endpoint_id: str, limit: int) -> None:
        epoch = self.epochs[endpoint_id]
        num_open = sum((one.endpoint_id, one.epoch) == (endpoint_id, epoch) for one in self.open)
        claimed = self.ledgers[row].claim(endpoint_id, str(epoch), limit)
        assert claimed == (num_open < limit)
        if claimed:
            assert all(ledger.load(endpoint_id).num_inflight == num_open + 1
                       for other, ledger in enumerate(self.ledgers) if other != row), "counted before it is booked"
            self.book(row, endpoint_id, 5, 10)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        booking = data.draw(st.sampled_from(self.open))
        booking.handle.prefill_done()
        booking.streaming = True

    @precondition(lambda self: self.open)
    @rule(data=st.data(), times=st.integers(1, 2))
    def end(self, data: st.DataObject, times: int) -> None:
        booking = data.draw(st.sampled_from(self.open))
        for _ in range(times):
            booking.handle.release()
        self.open.remove(booking)

    @rule(row=rows)
    def kill(self, row: int) -> None:
        """No guard of it gives back; the supervisor clears its row and another process begins there."""
        self.open = [booking for booking in self.open if booking.row != row]
        self.segment.clear_row(row)
        self.ledgers[row] = self._begin(row)

    @rule(endpoint_id=endpoints)
    def restart_worker(self, endpoint_id: str) -> None:
        self.epochs[endpoint_id] += 1
        for ledger in self.ledgers:
            ledger.begin(endpoint_id, str(self.epochs[endpoint_id]))

    @invariant()
    def every_process_sees_the_sums(self) -> None:
        for endpoint_id in ENDPOINTS:
            mine = [one for one in self.open
                    if one.endpoint_id == endpoint_id and one.epoch == self.epochs[endpoint_id]]
            expected = LoadView(len(mine), sum(one.prefill_tokens for one in mine if not one.streaming),
                                sum(one.context_tokens for one in mine if one.streaming))
            for ledger in self.ledgers:
                assert ledger.load(endpoint_id)[:3] == expected[:3]
                ledger._looked_at = -math.inf
                assert ledger.loads()[endpoint_id] == ledger.load(endpoint_id)
                columns = {name: account.column for name, account in ledger._accounts.items()
                           if isinstance(account, SharedAccount)}
                assert ledger._look_at_many(columns) == ledger._look(columns), "both ways to look see the same"


def test_what_others_have_is_looked_at_again_soon() -> None:
    machine = SharedLedgerMachine()
    assert machine.ledgers[1].loads()["a"] == LoadView()
    machine.book(0, "a", 10, 10)
    machine.book(1, "a", 1, 1)
    assert machine.ledgers[1].load("a").num_inflight == 2
    assert machine.ledgers[1].loads()["a"].num_inflight >= 1, "its own at once"
    machine.ledgers[1]._looked_at -= 2 * OTHERS_FRESH_S
    assert machine.ledgers[1].loads()["a"].num_inflight == 2
    machine.teardown()


TestSharedLedger = SharedLedgerMachine.TestCase
TestSharedLedger.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_machine_notices_a_row_that_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SharedLedgerMachine()
    machine.book(0, "a", 10, 10)
    monkeypatch.setattr(Segment, "clear_row", lambda self, row: None)
    machine.open.clear()
    with pytest.raises(AssertionError):
        machine.every_process_sees_the_sums()
    machine.teardown()
