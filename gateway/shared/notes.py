"""Notes between the event loops of one gateway's processes: it is your turn; I have sent this prompt there.

Owns: this process's inbox socket and the senders' ends of all others. A note is a hint and may be lost: whoever sends
one never waits, and whoever needs to be sure looks into the shared memory. Bets of one turn of the loop travel
together.
Must never: carry prompt text or token ids.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from worker.protocol.logs import get_logger

NOTE_MAX_BYTES = 60_000
NOTES_PER_TURN = 64
BET_MAX_BLOCKS = 4096
_TURN, _BETS = b"T", b"B"
_BET_HEAD = struct.Struct("<HHdI")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SharedBet:
    """Another process has sent this prompt to that life of a worker, where its blocks will be until `expires_at`."""

    endpoint_id: str
    epoch: str
    expires_at: float
    hashes: Sequence[int]


def note_sockets() -> tuple[socket.socket, socket.socket]:
    """(inbox, the end that others write to) of one row."""
    inbox, outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in (inbox, outlet):
        end.setblocking(False)
    return inbox, outlet


class Notes:
    """`outlets` by row, this process's own left out. Lives on the event loop."""

    def __init__(self, inbox: socket.socket, outlets: Mapping[int, socket.socket],
                 living: Callable[[], Sequence[int]]) -> None:
        self._inbox = inbox
        self._outlets = outlets
        self._living = living
        self._bets: list[bytes] = []
        self._num_bytes = 0
        self.on_turn: Callable[[], None] = lambda: None
        self.on_bet: Callable[[SharedBet], None] = lambda bet: None
        self.num_lost = 0

    def start(self) -> None:
        """Begin to read, without what was meant for the process that had this row before."""
        for _ in range(NOTES_PER_TURN * NOTES_PER_TURN):
            if self._receive() is None:
                break
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._read)

    def close(self) -> None:
        """Read no more."""
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())

    def your_turn(self, row: int) -> None:
        """A place at a worker is free, and that process has the next turn."""
        self._send(row, _TURN)

    def tell_bet(self, bet: SharedBet) -> None:
        """Tell the others, at the end of this turn of the loop."""
        if len(bet.hashes) > BET_MAX_BLOCKS or not self._others():
            return
        packed = _pack(bet)
        if self._num_bytes + len(packed) > NOTE_MAX_BYTES:
            self._flush()
        if not self._bets:
            asyncio.get_running_loop().call_soon(self._flush)
        self._bets.append(packed)
        self._num_bytes += len(packed)

    def _flush(self) -> None:
        if self._bets:
            note = b"".join((_BETS, *self._bets))
            self._bets, self._num_bytes = [], 0
            for row in self._others():
                self._send(row, note)

    def _others(self) -> list[int]:
        return [row for row in self._living() if row in self._outlets]

    def _send(self, row: int, note: bytes) -> None:
        try:
            self._outlets[row].send(note)
        except OSError:  # its inbox is full, or it is gone
            self.num_lost += 1

    def _receive(self) -> bytes | None:
        try:
            return self._inbox.recv(NOTE_MAX_BYTES + 1)
        except BlockingIOError:
            return None

    def _read(self) -> None:
        for _ in range(NOTES_PER_TURN):
            note = self._receive()
            if note is None:
                return
            if note == _TURN:
                self.on_turn()
            elif note[:1] == _BETS:
                for bet in _unpack(note):
                    self.on_bet(bet)


def _pack(bet: SharedBet) -> bytes:
    endpoint_id, epoch = bet.endpoint_id.encode(), bet.epoch.encode()
    head = _BET_HEAD.pack(len(endpoint_id), len(epoch), bet.expires_at, len(bet.hashes))
    return b"".join((head, endpoint_id, epoch, struct.pack(f"<{len(bet.hashes)}Q", *bet.hashes)))


def _unpack(note: bytes) -> list[SharedBet]:
    bets, at = [], 1
    while at < len(note):
        id_bytes, epoch_bytes, expires_at, num_hashes = _BET_HEAD.unpack_from(note, at)
        at += _BET_HEAD.size
        names = note[at:at + id_bytes + epoch_bytes]
        at += id_bytes + epoch_bytes
        hashes = struct.unpack_from(f"<{num_hashes}Q", note, at)
        at += 8 * num_hashes
        bets.append(SharedBet(names[:id_bytes].decode(), names[id_bytes:].decode(), expires_at, hashes))
    return bets
