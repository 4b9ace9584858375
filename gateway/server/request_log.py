"""What finished requests leave behind, their counts and a log line each, a little later and many at once.

Owns: the requests not yet accounted for, those of a turn of the loop and ENOUGH more, for FLUSH_S and a few turns. A
process that is killed takes those along; one that stops in order writes them first, and whoever reads the metrics has
them counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.server.request_record import RequestRecord
from worker.protocol.logs import log_many

FLUSH_S = 0.05
# So many are worth writing before their time, and together: some 20 us each where many come.
ENOUGH = 16
# While few come, whoever comes meanwhile waits for a piece at most, of 100 us.
PIECE = 4
MANY = ENOUGH + PIECE


class RequestLog:
    """Lives on the event loop. `name` is the lines' `source`; `count` takes a request and how long it took."""

    def __init__(self, name: str, count: Callable[[RequestRecord, float], None]) -> None:
        self._name = name
        self._count = count
        self._pending: list[tuple[float, RequestRecord, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing = False    # in a turn soon

    def add(self, record: RequestRecord, duration_s: float) -> None:
        """A request has ended; its record changes no more."""
        self._pending.append((time.time(), record, duration_s))
        if len(self._pending) >= ENOUGH and not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().call_soon(self._write)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._on_time)

    def flush(self) -> None:
        """Account for all that waits."""
        pending, self._pending = self._pending, []
        self._account(pending)

    def _account(self, ended: Sequence[tuple[float, RequestRecord, float]]) -> None:
        for _, record, duration_s in ended:
            self._count(record, duration_s)
        if ended:
            log_many(self._name, "request",
                     [(at, record.log_fields(duration_s)) for at, record, duration_s in ended])

    def _on_time(self) -> None:
        self._timer = None
        if not self._is_writing:
            self._write()

    def _write(self) -> None:
        """All of many, since they share what that takes; of a few a piece, and the next in the next turn."""
        pending = self._pending
        num = PIECE if len(pending) < MANY else len(pending)
        self._pending = pending[num:]
        self._is_writing = bool(self._pending)
        if self._pending:
            asyncio.get_running_loop().call_soon(self._write)
        self._account(pending[:num])
