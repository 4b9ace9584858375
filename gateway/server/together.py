"""A gateway process among others of the same gateway: what it hears from them and tells them, beyond the ledger.

Owns: the line to the supervisor, the notes, and when this process has taken in what an operator drained elsewhere.
Must never: decide; it hands on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gateway.knowledge.endpoint_table import EndpointTable
from gateway.server.admission import Admission
from gateway.server.metrics import GatewayMetrics
from gateway.shared.membership import Membership
from gateway.shared.segment import RowState
from gateway.shared.supervisor_line import SupervisorLine
from worker.protocol.logs import get_logger

DRAINS_INTERVAL_S = 0.1
WHOLE_METRICS_TIMEOUT_S = 2.0
_log = get_logger(__name__)

RequestDrain = Callable[[str], Awaitable[None]]


class Together:
    """Lives on the event loop; start(), leaving(), aclose()."""

    def __init__(self, membership: Membership, table: EndpointTable, *, admission: Admission,
                 metrics: GatewayMetrics, request_drain: RequestDrain) -> None:
        self._membership = membership
        self._table = table
        self._metrics = metrics
        self._request_drain = request_drain
        self._line = SupervisorLine(membership.line, metrics.snapshot)
        self._seen = 0
        membership.notes.on_turn = admission.call_next

    def start(self) -> None:
        """Begin to listen to the others."""
        self._line.start()
        self._membership.notes.start()

    def leaving(self) -> None:
        """No new connections are accepted here from now on."""
        self._membership.now(RowState.LEAVING)
        self._membership.close_listeners()

    async def aclose(self) -> None:
        """A last word, and nothing more."""
        self._membership.notes.close()
        await asyncio.to_thread(self._line.close)

    async def drain(self, endpoint_id: str) -> None:
        """An operator's drain, for every process; returns once all act on it."""
        endpoint = self._table.get(endpoint_id)
        if endpoint is None or endpoint.epoch is None:
            await self._request_drain(endpoint_id)
            return
        count = self._membership.drains.add(endpoint_id, endpoint.epoch)
        await self._take_in_drains()
        if not await self._membership.drains.seen_by_all(count):
            _log.warning("drain_unseen", worker=endpoint_id, reason="a process has not acted on it yet; it will "
                         "as soon as its event loop turns")

    async def watch_drains(self) -> None:
        """Take in what is drained through other processes. Runs for ever."""
        while True:
            await self._take_in_drains()
            await asyncio.sleep(DRAINS_INTERVAL_S)

    async def whole_metrics(self) -> bytes:
        """Of all processes; of this one alone when the supervisor does not answer."""
        try:
            async with asyncio.timeout(WHOLE_METRICS_TIMEOUT_S):
                return await asyncio.wrap_future(self._line.whole_metrics())
        except (TimeoutError, OSError) as error:
            _log.warning("metrics_of_one_process", reason=str(error) or "the supervisor did not answer in time")
            return self._metrics.render()

    def whole_metrics_now(self) -> bytes:
        """The same for a thread that may wait."""
        try:
            return self._line.whole_metrics().result(WHOLE_METRICS_TIMEOUT_S)
        except (TimeoutError, OSError):
            return self._metrics.render()

    async def _take_in_drains(self) -> None:
        drains = self._membership.drains
        count = drains.count
        if count == self._seen:
            drains.seen(count)
            return
        for endpoint in self._table:
            if endpoint.epoch is not None and not endpoint.drain_requested and drains.holds(endpoint.endpoint_id,
                                                                                            endpoint.epoch):
                await self._request_drain(endpoint.endpoint_id)
        self._seen = count
        drains.seen(count)
