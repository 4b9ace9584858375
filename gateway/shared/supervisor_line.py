"""A process's line to its supervisor, served by a thread of its own, so that it answers while the event loop is busy.

Owns: the thread and the socket. Must never: touch what only the event loop may write.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from gateway.shared.frames import HEAD, Word, frame, read_head
from worker.protocol.logs import get_logger

_log = get_logger(__name__)


class SupervisorLine:
    """Both are called in the thread: `snapshot` gives this process's metrics, `on_fleet` gets the workers that were
    added and removed, and what to call once they are taken in."""

    def __init__(self, line: socket.socket, snapshot: Callable[[], bytes],
                 on_fleet: Callable[[bytes, Callable[[], None]], None]) -> None:
        self._line = line
        self._snapshot = snapshot
        self._on_fleet = on_fleet
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[bytes]] = {}
        self._sending = threading.Lock()
        self._line.setblocking(True)
        self._thread = threading.Thread(target=self._serve, name="supervisor-line", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """A last word about the metrics, then hang up."""
        try:
            self._send(Word.YOURS_IS, 0, self._snapshot())
            self._line.shutdown(socket.SHUT_RDWR)
        except OSError as gone:
            _log.debug("supervisor_gone", reason=str(gone))
        self._thread.join(1.0)

    def whole_metrics(self) -> Future[bytes]:
        """The metrics of all processes together."""
        return self._ask(Word.WHOLE)

    def change(self, edit: bytes) -> Future[bytes]:
        """Have every process add or remove a worker. The answer comes once they have: what was wrong, or nothing."""
        return self._ask(Word.CHANGE, edit)

    def _ask(self, word: Word, payload: bytes = b"") -> Future[bytes]:
        number, future = next(self._numbers), Future[bytes]()
        self._asked[number] = future
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        try:
            self._send(word, number, payload)
        except OSError as gone:
            future.set_exception(gone)
        return future

    def _serve(self) -> None:
        try:
            while head := self._receive(HEAD.size):
                num_bytes, word, number = read_head(head)
                self._take(word, number, self._receive(num_bytes))
        except (OSError, ValueError) as broken:
            _log.debug("supervisor_line_broken", reason=str(broken))
        for future in list(self._asked.values()):
            future.set_exception(ConnectionError("the supervisor is gone"))

    def _take(self, word: Word, number: int, payload: bytes) -> None:
        if word is Word.YOURS:
            self._send(Word.YOURS_IS, number, self._snapshot())
        elif word is Word.FLEET:
            self._on_fleet(payload, lambda: self._send(Word.FLEET_IS, number))
        elif word in (Word.WHOLE_IS, Word.CHANGE_IS) and (future := self._asked.get(number)) is not None:
            future.set_result(payload)

    def _send(self, word: Word, number: int, payload: bytes = b"") -> None:
        with self._sending:
            self._line.sendall(frame(word, number, payload))

    def _receive(self, num_bytes: int) -> bytes:
        """So many bytes; none when the line has ended."""
        received = bytearray()
        while len(received) < num_bytes:
            part = self._line.recv(num_bytes - len(received))
            if not part:
                return b""
            received += part
        return bytes(received)
