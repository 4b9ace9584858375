"""A gateway process among others of the same gateway: what it hears from them and tells them, beyond the ledger.

Owns: the line to the supervisor, the notes, and when this process has taken in what an operator drained elsewhere.
Must never: decide; it hands on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from gateway.knowledge.endpoint_table import EndpointTable
from gateway.server.admission import Admission
from gateway.server.metrics import GatewayMetrics
from gateway.shared.fleet_edits import AddedWorker, edits_from, encode_edit
from gateway.shared.membership import Membership
from gateway.shared.segment import RowState
from gateway.shared.supervisor_line import SupervisorLine
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

DRAINS_INTERVAL_S = 0.1
WHOLE_METRICS_TIMEOUT_S = 2.0
CHANGE_TIMEOUT_S = 5.0  # more than the supervisor gives a process
_log = get_logger(__name__)

OfWorker = Callable[[str], Awaitable[None]]
TakeIn = Callable[[Mapping[str, AddedWorker | None]], Awaitable[None]]


class Together:
    """Lives on the event loop; start(), leaving(), aclose()."""

    def __init__(self, membership: Membership, table: EndpointTable, *, admission: Admission,
                 metrics: GatewayMetrics, request_drain: OfWorker, lift_drain: OfWorker, take_in: TakeIn) -> None:
        self._membership = membership
        self._table = table
        self._metrics = metrics
        self._request_drain = request_drain
        self._lift_drain = lift_drain
        self._take_in = take_in
        self._loop = asyncio.get_running_loop()
        self._taking_in: set[asyncio.Task[None]] = set()
        self._line = SupervisorLine(membership.line, metrics.snapshot, self._fleet_changed)
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
        await self._tell_all(endpoint_id, self._membership.drains.add, otherwise=self._request_drain)

    async def lift_drain(self, endpoint_id: str) -> None:
        """An operator takes a drain back, for every process; as drain()."""
        await self._tell_all(endpoint_id, self._membership.drains.lift, otherwise=self._lift_drain)

    async def _tell_all(self, endpoint_id: str, write: Callable[[str, str], int], *,
                        otherwise: Callable[[str], Awaitable[None]]) -> None:
        """Write it on the board for the life that the worker has; of one that has none only this process knows."""
        endpoint = self._table.get(endpoint_id)
        if endpoint is None or endpoint.epoch is None:
            await otherwise(endpoint_id)
            return
        count = write(endpoint_id, endpoint.epoch)
        await self._take_in_drains()
        if not await self._membership.drains.seen_by_all(count):
            _log.warning("drain_unseen", worker=endpoint_id, reason="a process has not acted on it yet; it will "
                         "as soon as its event loop turns")

    async def change(self, worker_id: str, added: AddedWorker | None) -> bytes:
        """Have every process add or remove a worker: what is wrong with that, or nothing. ApiError 503 when the
        supervisor does not answer."""
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                return await asyncio.wrap_future(self._line.change(encode_edit(worker_id, added)))
        except (TimeoutError, OSError) as error:
            raise ApiError(503, "supervisor_silent", "The gateway's supervisor does not answer; GET /admin/workers "
                           "shows what has changed.") from error

    def _fleet_changed(self, payload: bytes, taken_in: Callable[[], None]) -> None:
        """Called in the line's thread."""
        async def take_in() -> None:
            await self._take_in(edits_from(payload))
            with contextlib.suppress(OSError):  # a supervisor that is gone asks for nothing more
                taken_in()

        def begin() -> None:
            task = asyncio.create_task(take_in())
            self._taking_in.add(task)
            task.add_done_callback(self._taking_in.discard)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and this process with it
            self._loop.call_soon_threadsafe(begin)

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
            if endpoint.epoch is None:
                continue
            life = endpoint.endpoint_id, endpoint.epoch
            if not endpoint.drain_requested and drains.holds(*life):
                await self._request_drain(endpoint.endpoint_id)
            elif endpoint.drain_requested and drains.is_lifted(*life):
                await self._lift_drain(endpoint.endpoint_id)
        self._seen = count
        drains.seen(count)
