"""The probes' answers, for the event loop's routes and for the thread that stands in for it.

Owns: what /livez and /readyz say. Any thread may ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from gateway.knowledge.endpoint_table import EndpointState, EndpointTable

LIVEZ, READYZ, METRICS = "/livez", "/readyz", "/metrics"
JSON_TYPE = "application/json; charset=utf-8"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A loop that was busy for so long will not come back; an orchestrator should know.
STUCK_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A whole answer."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE


class Readiness:
    """Whether this gateway should get traffic: some worker ready, start-up sync over, not shutting down."""

    def __init__(self, table: EndpointTable, *, sync_timeout_s: float) -> None:
        self._table = table
        self._sync_until = time.monotonic() + sync_timeout_s
        self._was_synced = False
        self.closing = False

    def problem(self) -> str | None:
        """Why not; None when ready."""
        if self.closing:
            return "shutting down"
        if not any(endpoint.state in (EndpointState.READY, EndpointState.INCOMPATIBLE) for endpoint in self._table):
            return "no worker is ready"
        return None if self._is_synced() else "waiting for the workers' cache contents"

    def _is_synced(self) -> bool:
        """Start-up sync ends once: a feed that breaks later makes routing blinder, not the gateway unready."""
        self._was_synced = self._was_synced or time.monotonic() >= self._sync_until or all(
            endpoint.feed.in_sequence for endpoint in self._table
            if endpoint.state is EndpointState.READY and endpoint.scheme is not None
            and endpoint.report is not None and endpoint.report.events is not None)
        return self._was_synced


class Probes:
    """`late_s` tells how long ago the event loop last turned; `metrics` may wait for other processes."""

    def __init__(self, readiness: Readiness, *, late_s: Callable[[], float], metrics: Callable[[], bytes],
                 root_path: str = "") -> None:
        self._readiness = readiness
        self._root_path = root_path.rstrip("/")
        self._late_s = late_s
        self._metrics = metrics

    def livez(self) -> ProbeAnswer:
        """Alive, unless the event loop has been stuck for very long."""
        late_s = self._late_s()
        if late_s > STUCK_AFTER_S:
            return _status(503, f"the event loop has been stuck for {late_s:.0f} s")
        return _status(200, "ok")

    def readyz(self) -> ProbeAnswer:
        """See Readiness."""
        problem = self._readiness.problem()
        return _status(503 if problem else 200, problem or "ok")

    def answer(self, path: str, *, with_metrics: bool) -> ProbeAnswer | None:
        """The answer to GET `path`; None when it is no probe."""
        path = path.removeprefix(self._root_path)
        if path == LIVEZ:
            return self.livez()
        if path == READYZ:
            return self.readyz()
        if path == METRICS and with_metrics:
            return ProbeAnswer(200, self._metrics(), METRICS_TYPE)
        return None


def _status(code: int, text: str) -> ProbeAnswer:
    return ProbeAnswer(code, orjson.dumps({"status": text}))
