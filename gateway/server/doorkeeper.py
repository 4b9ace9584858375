"""A thread that accepts clients while the event loop cannot, and answers probes in its place.

It sleeps while every loop turns. When a slot is unattended (attendance.py) it accepts from that slot's sockets. If
this process's own loop turns, the connection is simply its from then on, so a dead or busy neighbour's new clients
wait for nobody. If not, the thread looks at the request's first line: probes and metrics it answers itself, and
everything else waits for the loop, as it would have.

Owns: connections between their acceptance and one of these ends. Must never: read what it does not answer; it peeks.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from aiohttp import web

from gateway.server.attendance import LATE_S, Attendance
from gateway.server.probes import ProbeAnswer
from worker.protocol.logs import get_logger

TICK_S = 0.1
ACCEPTS_PER_TURN = 64
WAITING_MAX = 256
FIRST_LINE_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 1.0
PEEK_BYTES = 16_384
_GET = re.compile(rb"GET (/[^ ?]*)(?:\?[^ ]*)? HTTP/1\.[01]\r\n")
_BODY = re.compile(rb"\r\n(content-length|transfer-encoding)[ \t]*:", re.IGNORECASE)
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Door:
    """One listening socket: whose it is, which server takes its clients, and which paths this thread may answer."""

    slot: int
    listener: socket.socket
    server: web.Server
    probes: Callable[[str], ProbeAnswer | None]
    tls: ssl.SSLContext | None = None


def no_probe(path: str) -> None:
    """Of a listener that speaks TLS, which this thread does not."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A client whose first line has not come yet."""

    door: Door
    until: float


class Doorkeeper:
    """start() in a running loop; stop() before the listeners are closed."""

    def __init__(self, doors: Sequence[Door], attendance: Attendance) -> None:
        # Descriptors of our own: the event loop closes the others when it likes.
        self._doors = [replace(door, listener=door.listener.dup()) for door in doors]
        self._attendance = attendance
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # a thread has none, and log lines take from it
        self._selector = selectors.DefaultSelector()
        self._open: set[Door] = set()
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._connecting: set[asyncio.Task[object]] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more. What waits is the event loop's."""
        self._stopped.set()
        self._thread.join(2 * TICK_S + SEND_TIMEOUT_S)
        for door in self._doors:
            door.listener.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._open_doors()
            if not self._open and not self._waiting:
                self._stopped.wait(TICK_S)
                continue
            for key, _ in self._selector.select(TICK_S):
                if isinstance(key.data, Door):
                    self._accept(key.data)
                elif isinstance(key.fileobj, socket.socket):
                    self._first_line(key.fileobj)
            self._give_up_waiting()
        for connection in list(self._waiting):
            self._hand_over(connection)
        self._selector.close()

    def _open_doors(self) -> None:
        slots = self._attendance.unattended()
        wanted = {door for door in self._doors if door.slot in slots} if len(self._waiting) < WAITING_MAX else set()
        for door in self._open - wanted:
            self._selector.unregister(door.listener)
        for door in wanted - self._open:
            self._selector.register(door.listener, selectors.EVENT_READ, door)
        self._open = wanted

    def _accept(self, door: Door) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = door.listener.accept()
            except OSError:  # somebody else was faster, or the client has gone
                return
            connection.setblocking(False)
            self._waiting[connection] = _Waiting(door, time.monotonic() + FIRST_LINE_TIMEOUT_S)
            self._selector.register(connection, selectors.EVENT_READ)
            if self._loop_turns():
                self._hand_over(connection)

    def _first_line(self, connection: socket.socket) -> None:
        try:
            head = connection.recv(PEEK_BYTES, socket.MSG_PEEK)
        except OSError:
            head = b""
        if head and b"\r\n\r\n" not in head and len(head) < PEEK_BYTES and b"GET ".startswith(head[:4]):
            return  # more of it will come, or its time runs out
        answer = self._answer(self._waiting[connection].door, head)
        if answer is None:
            self._hand_over(connection)
        else:
            self._forget(connection)
            _send(connection, answer, len(head))

    def _answer(self, door: Door, head: bytes) -> ProbeAnswer | None:
        """None: it is not for this thread to answer, and never a request with anything behind it."""
        found = _GET.match(head)
        if found is None or head.find(b"\r\n\r\n") != len(head) - 4 or _BODY.search(head):
            return None
        try:
            return door.probes(found[1].decode("ascii"))
        except UnicodeDecodeError:
            return None

    def _give_up_waiting(self) -> None:
        now, turns = time.monotonic(), self._loop_turns()
        for connection, waiting in list(self._waiting.items()):
            if turns or now >= waiting.until:
                self._hand_over(connection)

    def _loop_turns(self) -> bool:
        return self._attendance.late_s() <= LATE_S

    def _forget(self, connection: socket.socket) -> Door:
        self._selector.unregister(connection)
        return self._waiting.pop(connection).door

    def _hand_over(self, connection: socket.socket) -> None:
        door = self._forget(connection)
        try:
            self._loop.call_soon_threadsafe(self._take, door, connection, context=self._context)
        except RuntimeError:  # the loop has ended
            connection.close()

    def _take(self, door: Door, connection: socket.socket) -> None:
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(door.server, connection, ssl=door.tls))
        self._connecting.add(task)
        task.add_done_callback(self._taken)

    def _taken(self, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("client_gone", reason=str(error))


def _send(connection: socket.socket, answer: ProbeAnswer, num_head_bytes: int) -> None:
    phrase = HTTPStatus(answer.status).phrase
    head = (f"HTTP/1.1 {answer.status} {phrase}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n")
    try:
        with connection:
            connection.settimeout(SEND_TIMEOUT_S)
            connection.recv(num_head_bytes)  # unread, it would reset the connection at its end
            connection.sendall(head.encode() + answer.body)
            connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        _log.debug("client_gone", reason=str(error))
