"""Has hot prefixes computed on further workers ahead of need, as gateway.routing.copy_plan says.

Owns the task: a look every LOOK_EVERY_S, and one copy at a time.
Must never: let a failure out; a copy that could not be made is computed when somebody asks.
"""

from __future__ import annotations

import asyncio
import time

from gateway.knowledge.endpoint_table import EndpointTable
from gateway.routing.copy_plan import LOOK_EVERY_S, Copy, CopyPlan, Sight
from gateway.routing.endpoint import EndpointView
from gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from gateway.routing.load_ledger import NO_LOAD, LoadLedger
from gateway.server.prewarm import Prewarmer
from gateway.shared.membership import Membership
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

_log = get_logger(__name__)


class Ahead:
    """`run()` is a task of the gateway's."""

    def __init__(self, table: EndpointTable, ledger: LoadLedger, hot: HotPrefixes, prewarmer: Prewarmer, *,
                 membership: Membership | None = None) -> None:
        self._table = table
        self._ledger = ledger
        self._plan = CopyPlan(hot)
        self._prewarmer = prewarmer
        self._membership = membership

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            loads = self._ledger.loads()
            sight = Sight(self._views, loads, self._holders, self._looks_before, self._table.crowding(loads))
            if (copy := self._plan.next(sight, time.monotonic())) is not None:
                await self._make(copy)

    def _views(self) -> list[EndpointView]:
        loads = self._ledger.loads()
        return [endpoint.view(loads.get(endpoint.endpoint_id, NO_LOAD)) for endpoint in self._table
                if endpoint.report is not None and endpoint.joined_epoch is not None]

    def _holders(self, prefix: HotPrefix) -> list[str]:
        return self._prewarmer.holders(prefix, time.monotonic(), on_the_way=True)

    def _looks_before(self, key: int) -> int:
        if self._membership is None:
            return 0
        living, row = self._membership.segment.living(), self._membership.seat.row
        return (living.index(row) + key) % len(living) if row in living else 0

    async def _make(self, copy: Copy) -> None:
        prefix, endpoint = copy.prefix, self._table.get(copy.endpoint_id)
        assert endpoint is not None, "the plan chose an endpoint that it was not shown"
        try:
            done = await self._prewarmer.compute(prefix, endpoint)
        except ApiError as why:
            _log.warning("copy_not_made", worker=endpoint.endpoint_id, reason=why.message)
            return
        _log.info("copy_made", worker=endpoint.endpoint_id, tokens=prefix.num_tokens,
                  cached_tokens=done.cached_tokens)
