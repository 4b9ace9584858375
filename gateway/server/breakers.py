"""The breaker of every worker, in its present life.

Owns: one Breaker for each endpoint and epoch; a worker that has come back begins with a closed one. Must never:
decide when a breaker opens (routing.breaker does) or refuse a request (the dispatcher does, while another is left).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gateway.knowledge.endpoint_table import Endpoint, EndpointTable
from gateway.relay.retry import DEADLINE
from gateway.routing.breaker import Breaker, BreakerLimits, BreakerPass, BreakerState
from worker.protocol.logs import get_logger

# What does not count against a worker: it is busy, draining or loading and says so, the gateway's token is wrong, or
# the client's own deadline was too short.
NEUTRAL_REASONS = ("busy", "unavailable", "refused", DEADLINE)
_log = get_logger(__name__)


class Breakers:
    """As many as there are workers in the table."""

    def __init__(self, table: EndpointTable, limits: BreakerLimits) -> None:
        self._table = table
        self._limits = limits
        self._breakers: dict[str, tuple[str | None, Breaker]] = {}
        self.may_be_open = False   # whether any has opened since all were seen closed

    def begin(self, endpoint: Endpoint) -> BreakerPass:
        """A request goes there."""
        known = self._breakers.get(endpoint.endpoint_id)
        breaker = known[1] if known is not None and known[0] == endpoint.joined_epoch else self._of(endpoint)
        return breaker.begin()

    def blocked(self, endpoints: Sequence[Endpoint]) -> frozenset[str]:
        """Those that should not get a request now; none unless `may_be_open`."""
        self.may_be_open = any(breaker.is_open for _, breaker in self._breakers.values())
        now = time.monotonic()
        return frozenset(endpoint.endpoint_id for endpoint in endpoints
                         if endpoint.endpoint_id in self._breakers and not self._of(endpoint).may_send(now))

    def states(self) -> Iterator[tuple[str, BreakerState]]:
        """Of every worker, for the metric."""
        now = time.monotonic()
        for endpoint in self._table:
            yield endpoint.endpoint_id, self._of(endpoint).state(now)

    def failed(self, endpoint: Endpoint, passed: BreakerPass, reason: str) -> None:
        """The request that had this pass failed there."""
        if reason in NEUTRAL_REASONS:
            passed.left()
            return
        now, breaker = time.monotonic(), self._of(endpoint)
        before = breaker.state(now)
        passed.failed(now)
        self.may_be_open = True
        if breaker.state(now) is BreakerState.OPEN and before is not BreakerState.OPEN:
            _log.warning("breaker_open", worker=endpoint.endpoint_id, reason=reason)

    def _of(self, endpoint: Endpoint) -> Breaker:
        epoch, breaker = self._breakers.get(endpoint.endpoint_id, (None, None))
        if breaker is None or epoch != endpoint.epoch:
            breaker = Breaker(self._limits)
            self._breakers[endpoint.endpoint_id] = endpoint.epoch, breaker
        return breaker
