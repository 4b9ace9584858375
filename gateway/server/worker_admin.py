"""POST /admin/workers and DELETE /admin/workers/{id}: the fleet changes while the gateway runs.

Owns: what an operator may add, and where. Must never: send anything to an address outside worker_networks.
With several processes the supervisor has every one of them change, also those that start later. What is added here is
forgotten at a restart of the whole gateway; the configuration is what lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated
from urllib.parse import unquote

import msgspec
from aiohttp import web
from aiohttp.web_request import BaseRequest
from msgspec import Meta

from gateway.admission.worker_networks import WorkerNetworks
from gateway.config import GatewayConfig, WorkerSpec
from gateway.knowledge.discovery.static import DiscoveryError, static_workers
from gateway.knowledge.endpoint_table import EndpointTable
from gateway.knowledge.worker_poll import WorkerPoll
from gateway.server.http import Routes, json_response, read_body
from gateway.server.metrics import GatewayMetrics
from gateway.shared.fleet_edits import TOO_MANY, WORKER_EXISTS, AddedWorker
from worker.prompt.json_body import decode_body
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.logs import get_logger

WORKERS_PATH = "/admin/workers"
WORKERS_PREFIX = WORKERS_PATH + "/"
BODY_MAX_BYTES = 64 * 1024
WORKERS_MAX = 4096
_log = get_logger(__name__)


class WorkerBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /admin/workers."""

    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    id: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.:@-]+(?!\n)$")] | None = None
    api_key: Annotated[str, Meta(min_length=1, max_length=512)] | None = None


_decoder = msgspec.json.Decoder(WorkerBody)


class Workforce:
    """The workers of this process, as operators change them."""

    def __init__(self, table: EndpointTable, poll: WorkerPoll, metrics: GatewayMetrics) -> None:
        self._table = table
        self._poll = poll
        self._metrics = metrics
        self._changing = asyncio.Lock()

    async def change(self, worker_id: str, added: AddedWorker | None) -> bytes:
        """A change of this process alone; nothing can be wrong with it."""
        await self.take_in({worker_id: added})
        return b""

    async def take_in(self, edits: Mapping[str, AddedWorker | None]) -> None:
        """Make it so; what is so already stays."""
        async with self._changing:
            for worker_id, added in edits.items():
                known = self._table.get(worker_id)
                if known is not None and (added is None or known.worker.url != added.url):
                    await self._poll.remove(worker_id)
                    self._metrics.forget_worker(worker_id)
                    _log.info("worker_removed", worker=worker_id)
                if added is not None and self._table.get(worker_id) is None:
                    (worker,) = static_workers([WorkerSpec(added.url, worker_id, added.api_key)])
                    await self._poll.add(worker)
                    _log.info("worker_added", worker=worker_id, url=worker.url)


class WorkerAdmin:
    """Adds its routes to a table. `authorise` raises unless a request carries the admin token; `change` makes a
    change wherever it has to be known, and says what is wrong with it, or nothing."""

    def __init__(self, config: GatewayConfig, table: EndpointTable, *, authorise: Callable[[BaseRequest], None],
                 change: Callable[[str, AddedWorker | None], Awaitable[bytes]]) -> None:
        self._table = table
        self._authorise = authorise
        self._change = change
        self._networks = WorkerNetworks(config.worker_networks, [spec.url for spec in config.workers])

    def add_to(self, routes: Routes) -> None:
        """Serve both."""
        self._routes = routes
        routes.add("POST", WORKERS_PATH, self._add)
        routes.add_prefix("DELETE", WORKERS_PREFIX, self._remove)

    async def _add(self, request: BaseRequest) -> web.Response:
        self._authorise(request)
        body, _ = decode_body(await read_body(request, BODY_MAX_BYTES), _decoder)
        problem = self._networks.problem(body.url)
        if problem is not None:
            raise ApiError(403, "forbidden", f"No worker may be added at this URL: {problem}.", param="url")
        try:
            (worker,) = static_workers([WorkerSpec(body.url, body.id, body.api_key)])
        except DiscoveryError as error:
            raise invalid_request(f"{error}.", "url") from None
        for known in self._table:  # under two names its places and its load would be counted twice
            if known.worker.url == worker.url and known.endpoint_id != worker.endpoint_id:
                raise ApiError(409, "worker_exists", f"The worker {known.endpoint_id!r} is at this URL already.",
                               param="url")
        said = WORKER_EXISTS if self._table.get(worker.endpoint_id) is not None else TOO_MANY
        if said is WORKER_EXISTS or len(list(self._table)) >= WORKERS_MAX or (
                said := await self._change(worker.endpoint_id, AddedWorker(worker.url, body.api_key))):
            raise _refusal(said, worker.endpoint_id)
        return json_response({"id": worker.endpoint_id, "state": "unready"}, status=201)

    async def _remove(self, request: BaseRequest) -> web.Response:
        self._authorise(request)
        worker_id = unquote(self._routes.path_of(request).removeprefix(WORKERS_PREFIX))
        if self._table.get(worker_id) is None:
            raise ApiError(404, "worker_not_found", f"There is no worker {worker_id[:200]!r}; see /admin/workers.")
        if said := await self._change(worker_id, None):
            raise _refusal(said, worker_id)
        return json_response({"id": worker_id, "state": "removed"})


def _refusal(said: bytes, worker_id: str) -> ApiError:
    if said == WORKER_EXISTS:
        return ApiError(409, "worker_exists", f"There is a worker {worker_id!r} already.", param="id")
    return ApiError(409, "too_many_workers", f"There are {WORKERS_MAX} workers already.")
