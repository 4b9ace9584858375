"""The operators' routes: liveness, readiness, metrics, and the admin routes behind their token.

Owns: who may see what. Must never: show prompt text, a token or a seed.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest

from gateway import errors
from gateway.knowledge.endpoint_table import Endpoint
from gateway.server.foreign import MESSAGES, RESPONSES
from gateway.server.generate import Generate
from gateway.server.generate_route import CHAT, COMPLETIONS, FOREIGN, GenerateRoute
from gateway.server.http import Routes, json_response, read_body
from gateway.server.prewarm import Prewarmer
from gateway.server.probes import LIVEZ, METRICS, METRICS_TYPE, READYZ, ProbeAnswer, Probes
from gateway.server.prompt_limit import refusal_of_answer
from gateway.server.reading import Given, Intake
from gateway.server.request_record import RequestRecord
from gateway.server.state import GatewayState
from worker.protocol.api_error import ApiError, invalid_request

WORKERS_PREFIX = "/admin/workers/"
EXPLAINED_ROUTES = {"messages": CHAT, "prompt": COMPLETIONS, "input": FOREIGN[RESPONSES.path]}
DRAIN_SUFFIX, UNDRAIN_SUFFIX = "/drain", "/undrain"


class OpsRoutes:
    """Adds its routes to a table. `request_drain` and `lift_drain` hand an operator's wish to the keeper of the
    endpoint table; `whole_metrics` gives those of all processes, where there are several."""

    def __init__(self, state: GatewayState, generate: Generate, *, probes: Probes, admin_token: str,
                 request_drain: Callable[[str], Awaitable[None]], lift_drain: Callable[[str], Awaitable[None]],
                 prewarmer: Prewarmer, whole_metrics: Callable[[], Awaitable[bytes]] | None = None) -> None:
        self._table = state.table
        self._index = state.index
        self._ledger = state.ledger
        self._writer = state.writer
        self._metrics = state.metrics
        self._access = state.access
        self._max_body_bytes = state.config.max_body_bytes
        self._probes = probes
        self._generate = generate
        self._admin_token = admin_token.encode()
        self._request_drain = request_drain
        self._lift_drain = lift_drain
        self._prewarmer = prewarmer
        self._whole_metrics = whole_metrics

    def add_probes(self, routes: Routes) -> None:
        """/livez and /readyz: on every listener."""
        routes.add("GET", LIVEZ, self._livez)
        routes.add("GET", READYZ, self._readyz)

    def add_metrics(self, routes: Routes) -> None:
        """/metrics tells of models and workers to whoever can reach the listener."""
        routes.add("GET", METRICS, self._render_metrics)

    def add_admin(self, routes: Routes) -> None:
        """The routes that want the admin token."""
        self._routes = routes
        routes.add("GET", "/admin/workers", self._workers)
        routes.add_prefix("POST", WORKERS_PREFIX, self._drain, suffix=DRAIN_SUFFIX)
        routes.add_prefix("POST", WORKERS_PREFIX, self._undrain, suffix=UNDRAIN_SUFFIX)
        routes.add("POST", "/admin/explain", self._explain)
        routes.add("GET", "/admin/cache", self._cache)
        routes.add("POST", "/admin/prewarm", self._prewarm)

    async def _livez(self, request: BaseRequest) -> web.Response:
        return _response(self._probes.livez())

    async def _readyz(self, request: BaseRequest) -> web.Response:
        return _response(self._probes.readyz())

    async def _render_metrics(self, request: BaseRequest) -> web.Response:
        body = self._metrics.render() if self._whole_metrics is None else await self._whole_metrics()
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def _workers(self, request: BaseRequest) -> web.Response:
        self.authorise(request)
        return json_response({"workers": [self._worker(endpoint) for endpoint in self._table]})

    async def _drain(self, request: BaseRequest) -> web.Response:
        endpoint = self._named(request, DRAIN_SUFFIX)
        await self._request_drain(endpoint.endpoint_id)
        return json_response({"id": endpoint.endpoint_id, "state": "draining"}, status=202)

    async def _undrain(self, request: BaseRequest) -> web.Response:
        endpoint = self._named(request, UNDRAIN_SUFFIX)
        await self._lift_drain(endpoint.endpoint_id)
        return json_response({"id": endpoint.endpoint_id, "state": endpoint.state.value})

    def _named(self, request: BaseRequest, suffix: str) -> Endpoint:
        """The worker that an operator's path names before `suffix`."""
        self.authorise(request)
        worker_id = unquote(self._routes.path_of(request).removeprefix(WORKERS_PREFIX).removesuffix(suffix))
        endpoint = self._table.get(worker_id)
        if endpoint is None:
            raise ApiError(404, "worker_not_found", f"There is no worker {worker_id[:200]!r}; see /admin/workers.")
        return endpoint

    async def _cache(self, request: BaseRequest) -> web.Response:
        self.authorise(request)
        return json_response({"prefixes": self._prewarmer.cache()})

    async def _prewarm(self, request: BaseRequest) -> web.Response:
        self.authorise(request)
        return json_response(await self._prewarmer.prewarm(await read_body(request, self._max_body_bytes)))

    async def _explain(self, request: BaseRequest) -> web.Response:
        """A request's body in, the decision out, for the tenant of `?tenant=ID`; nothing is booked or sent."""
        self.authorise(request)
        body = await read_body(request, self._max_body_bytes)
        intake = await self._generate.take_in(Given(body, _route_of(body), RequestRecord("explain", "/admin/explain"),
                                                    self._access.named(request.query.get("tenant")), {}))
        explained = self._generate.explain(intake)
        refusal = self._refusal(intake, explained["decision"])
        return json_response({**explained, "would_be_refused": None if refusal is None else refusal.body()["error"]})

    def _refusal(self, intake: Intake, decision: Mapping[str, Any] | None) -> ApiError | None:
        """What the chosen worker will say of the answer's length, which is all of its checks that is known here."""
        endpoint = None if decision is None else self._table.get(decision["endpoint_id"])
        parsed = intake.parsed
        if endpoint is None or endpoint.report is None or parsed.max_tokens is None or parsed.max_tokens_is_default:
            return None
        return refusal_of_answer(parsed.max_tokens, intake.routed.num_prompt_tokens, endpoint.report.max_context)

    def authorise(self, request: BaseRequest) -> None:
        """ApiError 401 unless the request carries the admin token."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        is_right = hmac.compare_digest(given, self._admin_token)
        if not (self._admin_token and scheme.lower() == "bearer" and is_right):
            raise errors.unauthenticated()

    def _worker(self, endpoint: Endpoint) -> dict[str, Any]:
        report, worker_id = endpoint.report, endpoint.endpoint_id
        return {
            "id": worker_id, "url": endpoint.worker.url,
            "models": [endpoint.model, *endpoint.adapters] if endpoint.model else [],
            "engine": report.engine if report else None, "version": report.version if report else None,
            "state": endpoint.state.value, "detail": endpoint.detail, "knowledge": endpoint.knowledge.value,
            "epoch": endpoint.epoch, "pid": endpoint.worker.pid or (report.pid if report else None),
            "blocks": self._index.num_blocks(worker_id),
            "speculative_blocks": self._index.num_speculative_blocks(worker_id),
            "blocks_total": report.blocks.total if report else None,
            "inflight": self._ledger.load(worker_id).num_inflight,
            "hash_scheme_digest": report.hash_scheme_digest if report else None,
            "block_size": report.block_size if report else None,
            "parity": endpoint.parity.as_json() if endpoint.parity else None,
            "events": {"in_sequence": endpoint.feed.in_sequence, "batches": endpoint.feed.num_applied_batches,
                       "gaps": endpoint.feed.num_gaps, "replays": endpoint.feed.num_replays,
                       "resyncs": endpoint.feed.num_resyncs, "duplicates": endpoint.feed.num_duplicates,
                       "undecodable": endpoint.feed.num_undecodable, "lag_s": endpoint.feed.lag_s,
                       "orphans": self._writer.counts(worker_id).num_orphans,
                       "detail": endpoint.feed.detail},
        }


def _response(answer: ProbeAnswer) -> web.Response:
    return web.Response(body=answer.body, status=answer.status, headers={"Content-Type": answer.content_type})


def _route_of(body: bytes) -> GenerateRoute:
    """The route that such a body is for. ApiError 400 when it has the prompt of none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return CHAT  # the strict parser then says what is wrong with it
    if not isinstance(fields, dict):
        return CHAT
    if "messages" in fields and "system" in fields:
        return FOREIGN[MESSAGES.path]   # Anthropic's: a chat has that in its messages
    for name, route in EXPLAINED_ROUTES.items():
        if name in fields:
            return route
    raise invalid_request("Missing required field: messages (chat), prompt (completions) or input (responses).",
                          "messages")
