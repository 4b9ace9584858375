"""One process's place in its gateway: its row of the shared memory, its sockets, and the shapes of both.

Owns: putting the shared parts together from what the supervisor passed on. Must never: start a process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from gateway.admission.places import Places
from gateway.shared.drain_board import DrainBoard
from gateway.shared.notes import Notes
from gateway.shared.row_table import RowTable
from gateway.shared.segment import RowState, Segment
from gateway.shared.shared_ledger import SharedLedger
from gateway.shared.shared_meters import SharedMeters
from gateway.shared.shared_places import SharedPlaces


@dataclass(frozen=True, slots=True)
class Seat:
    """What the supervisor tells a process at its start. Numbers of open descriptors; lists by slot or by row.

    `accepts_at_once`: false when another process, or the kernel's queue, has the clients until this one is ready.
    """

    slot: int
    row: int
    segment: int
    line: int
    listeners: Sequence[Sequence[int]]
    ops_listeners: Sequence[Sequence[int]]
    inboxes: Sequence[int]
    outlets: Sequence[int]
    accepts_at_once: bool = True

    def to_text(self) -> str:
        """For the child's command line."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> Seat:
        """See to_text."""
        return cls(**orjson.loads(text))

    def descriptors(self) -> list[int]:
        """All of them, for the child to inherit."""
        listeners = [number for group in (*self.listeners, *self.ops_listeners) for number in group]
        return [self.segment, self.line, self.inboxes[self.row], *self.outlets, *listeners]


class Membership:
    """A member's shared parts. Notes are read from start_notes() on, in a running loop."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.segment = Segment(seat.segment)
        self.ledger = SharedLedger(RowTable(self.segment, self.segment.layout.endpoints, seat.row))
        self.meters = SharedMeters(self.segment, seat.row, wall_offset_s=time.time() - time.monotonic())
        self.drains = DrainBoard(self.segment, seat.row)
        self.line = socket.socket(fileno=seat.line)
        self.listeners = [_sockets(group) for group in seat.listeners]
        self.ops_listeners = [_sockets(group) for group in seat.ops_listeners]
        outlets = _by_row(seat.outlets, without=seat.row)
        self.notes = Notes(_socket(seat.inboxes[seat.row]), outlets, self.segment.living)
        self._lines = RowTable(self.segment, self.segment.layout.lines, seat.row)

    def places(self, model: str) -> Places:
        """The places at this model's workers."""
        column = self._lines.column(model)
        return Places() if column is None else SharedPlaces(self._lines, column)

    def close_listeners(self) -> None:
        """Let go of every listening socket: while this process drains none may outlive the supervisor."""
        for group in (*self.listeners, *self.ops_listeners):
            for listener in group:
                listener.close()

    def now(self, state: RowState) -> None:
        """Tell the others what this process is doing."""
        self.segment.set_state(self.seat.row, state)


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _sockets(descriptors: Sequence[int]) -> list[socket.socket]:
    found = [_socket(number) for number in descriptors]
    for each in found:
        each.setblocking(False)
    return found


def _by_row(descriptors: Sequence[int], *, without: int) -> Mapping[int, socket.socket]:
    return {row: _socket(number) for row, number in enumerate(descriptors) if row != without}
