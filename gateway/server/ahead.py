"""Has hot prefixes computed on further workers ahead of need, as gateway.routing.copies says.

Owns the pace: one prefix at a time, and none twice on one life of a worker within AGAIN_S, whatever became of it.
Must never: let a failure out; a copy that could not be made is computed when somebody asks.
"""

from __future__ import annotations

import asyncio
import time

from gateway.knowledge.endpoint_table import Endpoint, EndpointTable
from gateway.routing.copies import is_worth_copies, next_holder
from gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from gateway.routing.load_ledger import NO_LOAD, LoadLedger
from gateway.server.prewarm import Prewarmer
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

PAUSE_S = 0.25
LOOKED_AT_MAX = 8     # the hottest ones
AGAIN_S = 60.0
TRIED_MAX = 4096
_log = get_logger(__name__)


class Ahead:
    """`run()` is a task of the gateway's."""

    def __init__(self, table: EndpointTable, ledger: LoadLedger, hot: HotPrefixes, prewarmer: Prewarmer) -> None:
        self._table = table
        self._ledger = ledger
        self._hot = hot
        self._prewarmer = prewarmer
        self._tried: dict[tuple[int, str, str | None], float] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S)
            chosen = self._next(time.monotonic())
            if chosen is not None:
                await self._copy(*chosen)

    def _next(self, now: float) -> tuple[HotPrefix, Endpoint] | None:
        if not len(self._hot):
            return None
        for key, prefix in self._hot.hottest(LOOKED_AT_MAX, now):
            if not is_worth_copies(prefix, now):
                continue
            endpoint = self._endpoint_for(key, prefix, now)
            if endpoint is not None:
                self._note_tried((key, endpoint.endpoint_id, endpoint.epoch), now)
                return prefix, endpoint
        return None

    def _endpoint_for(self, key: int, prefix: HotPrefix, now: float) -> Endpoint | None:
        loads = self._ledger.loads()
        holders = self._prewarmer.holders(prefix, now)
        asked = {endpoint.endpoint_id: endpoint for endpoint in self._table.serving(prefix.model)
                 if endpoint.endpoint_id in holders
                 or now - self._tried.get((key, endpoint.endpoint_id, endpoint.epoch), -AGAIN_S) >= AGAIN_S}
        chosen = next_holder(prefix, [endpoint.view(loads.get(endpoint_id, NO_LOAD))
                                      for endpoint_id, endpoint in asked.items()], holders, loads)
        return None if chosen is None else asked[chosen]

    async def _copy(self, prefix: HotPrefix, endpoint: Endpoint) -> None:
        try:
            done = await self._prewarmer.compute(prefix, endpoint)
        except ApiError as why:
            _log.warning("copy_not_made", worker=endpoint.endpoint_id, reason=why.message)
            return
        _log.info("copy_made", worker=endpoint.endpoint_id, tokens=prefix.num_tokens,
                  cached_tokens=done.cached_tokens)

    def _note_tried(self, key: tuple[int, str, str | None], now: float) -> None:
        self._tried[key] = now
        if len(self._tried) > TRIED_MAX:
            del self._tried[next(iter(self._tried))]
