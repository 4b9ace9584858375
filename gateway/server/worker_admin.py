"""POST /admin/workers and DELETE /admin/workers/{id}: the fleet changes while the gateway runs.

Owns: what an operator may add, and where. Must never: send anything to an address outside worker_networks.
What is added here is forgotten at a restart; the configuration is what lasts.
"""

from __future__ import annotations

from collections.abc import Callable
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


class WorkerAdmin:
    """Adds its routes to a table. `authorise` raises unless a request carries the admin token; `is_alone`: this is
    the only process of the gateway."""

    def __init__(self, config: GatewayConfig, table: EndpointTable, poll: WorkerPoll, metrics: GatewayMetrics, *,
                 authorise: Callable[[BaseRequest], None], is_alone: bool) -> None:
        self._table = table
        self._poll = poll
        self._metrics = metrics
        self._authorise = authorise
        self._is_alone = is_alone
        self._networks = WorkerNetworks(config.worker_networks, [spec.url for spec in config.workers])

    def add_to(self, routes: Routes) -> None:
        """Serve both."""
        self._routes = routes
        routes.add("POST", WORKERS_PATH, self._add)
        routes.add_prefix("DELETE", WORKERS_PREFIX, self._remove)

    async def _add(self, request: BaseRequest) -> web.Response:
        self._authorise(request)
        body, _ = decode_body(await read_body(request, BODY_MAX_BYTES), _decoder)
        self._check_alone()
        problem = self._networks.problem(body.url)
        if problem is not None:
            raise ApiError(403, "forbidden", f"No worker may be added at this URL: {problem}.", param="url")
        try:
            (worker,) = static_workers([WorkerSpec(body.url, body.id, body.api_key)])
        except DiscoveryError as error:
            raise invalid_request(f"{error}.", "url") from None
        if self._table.get(worker.endpoint_id) is not None:
            raise ApiError(409, "worker_exists", f"There is a worker {worker.endpoint_id!r} already.", param="id")
        if len(list(self._table)) >= WORKERS_MAX:
            raise ApiError(409, "too_many_workers", f"There are {WORKERS_MAX} workers already.")
        await self._poll.add(worker)
        _log.info("worker_added", worker=worker.endpoint_id, url=worker.url)
        return json_response({"id": worker.endpoint_id, "state": "unready"}, status=201)

    async def _remove(self, request: BaseRequest) -> web.Response:
        self._authorise(request)
        worker_id = unquote(self._routes.path_of(request).removeprefix(WORKERS_PREFIX))
        if self._table.get(worker_id) is None:
            raise ApiError(404, "worker_not_found", f"There is no worker {worker_id[:200]!r}; see /admin/workers.")
        self._check_alone()
        await self._poll.remove(worker_id)
        self._metrics.forget_worker(worker_id)
        _log.info("worker_removed", worker=worker_id)
        return json_response({"id": worker_id, "state": "removed"})

    def _check_alone(self) -> None:
        if not self._is_alone:
            raise ApiError(409, "several_processes", "With --processes above 1 the workers are those of the "
                           "configuration: change it there and send SIGHUP.")
