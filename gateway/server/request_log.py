"""What finished requests leave behind, their counts and a log line each, a little later and many at once.

Owns: the requests not yet accounted for, at most MAX_PENDING of them and for at most FLUSH_S. A process that is
killed takes those along; one that stops in order writes them first, and whoever reads the metrics has them counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.server.request_record import RequestRecord
from worker.protocol.logs import log_many

FLUSH_S = 0.05
# Few enough that nobody who comes meanwhile waits for long: some 20 us each.
MAX_PENDING = 16


class RequestLog:
    """Lives on the event loop. `name` is the lines' `source`; `count` takes a request and how long it took."""

    def __init__(self, name: str, count: Callable[[RequestRecord, float], None]) -> None:
        self._name = name
        self._count = count
        self._pending: list[tuple[float, RequestRecord, float]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: RequestRecord, duration_s: float) -> None:
        """A request has ended; its record changes no more."""
        self._pending.append((time.time(), record, duration_s))
        if len(self._pending) >= MAX_PENDING:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._on_time)

    def flush(self) -> None:
        """Account for what waits."""
        pending, self._pending = self._pending, []
        for _, record, duration_s in pending:
            self._count(record, duration_s)
        if pending:
            log_many(self._name, "request",
                     [(at, record.log_fields(duration_s)) for at, record, duration_s in pending])

    def _on_time(self) -> None:
        self._timer = None
        self.flush()
