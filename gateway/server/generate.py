"""POST /v1/chat/completions, /v1/completions, and the APIs that become chat: one request's life in eight steps.

read - parse - tokenise and hash - match, pick, book - open upstream (retrying elsewhere before the first byte) -
relay - release - account. Owns the order of these steps and that the last two always happen.
Must never: keep prompt text, or answer a client's mistake with a 5xx.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest

from gateway import errors
from gateway.admission.tenants import Tenant
from gateway.knowledge.endpoint_table import Endpoint
from gateway.knowledge.joining import ModelReference
from gateway.relay.connection_pool import PooledUpstream
from gateway.relay.relay import (
    ClientLeft,
    RelayLimits,
    Watch,
    Write,
    end_stream,
    pass_stream,
    read_whole,
    relay_bytes,
    relay_rest,
)
from gateway.relay.retry import AttemptFailed, FirstAnswer, Refusal, Walk
from gateway.relay.shortcut import SendNow, SoFar
from gateway.relay.sse import is_event_stream
from gateway.relay.transcript import Transcript
from gateway.relay.upstream import UpstreamFailure, UpstreamRequest
from gateway.server.addressing import ChoiceToResume, passed_on_headers, upstream_request
from gateway.server.admission import Visit
from gateway.server.answering import Answering, Beginning, Taken
from gateway.server.client_headers import DEADLINE_HEADER, MIGRATION_HEADER, REQUEST_ID_HEADER
from gateway.server.dispatch import Choosing, Dispatcher
from gateway.server.express import Express, Passenger
from gateway.server.express_connection import take_begun
from gateway.server.foreign import Way, errors_of, set_way_back, way_back
from gateway.server.generate_route import CHAT, COMPLETIONS, EMBEDDINGS, FOREIGN, GenerateRoute
from gateway.server.http import (
    CLIENT_CLOSED_REQUEST,
    Routes,
    read_body,
    request_id_of,
    set_request_id,
)
from gateway.server.migration import (
    Broken,
    MigrationLimits,
    Migrator,
    tells_tokens,
    wants_migration,
)
from gateway.server.prompt_metrics import PromptMemoryCollector
from gateway.server.prompt_work import PromptWork
from gateway.server.raw_response import (
    STREAM_HEADERS,
    BegunStream,
    ClientStream,
    EventStream,
    UnmeasuredResponse,
    WholeResponse,
)
from gateway.server.reading import Given, Intake, Reading
from gateway.server.replies import Learn, learn_from_stream
from gateway.server.request_log import RequestLog
from gateway.server.request_record import RequestRecord
from gateway.server.state import GatewayState
from gateway.server.whole_answer import JSON_TYPE, answer_began, answer_ended, tell_routing
from worker.prompt.foreign_api import ForeignApi
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

QUEUE_FULL = "queue_full"
_log = get_logger(__name__)


class Going(NamedTuple):
    """A request on its usual way; `begun`: as far as the express lane has brought it."""

    route: GenerateRoute
    record: RequestRecord
    headers: Mapping[str, str]
    begun: Passenger | None


class Passing(NamedTuple):
    """A stream to its client; `so_far`: in the express lane."""

    response: web.StreamResponse
    write: Write
    send_now: SendNow | None
    transcript: Transcript | None
    so_far: SoFar | None = None


class Generate:
    """The data path. `suspect` is told of workers that failed a request."""

    def __init__(self, state: GatewayState, *, dispatcher: Dispatcher, prompt_work: PromptWork,
                 upstream: PooledUpstream, suspect: Callable[[str], None]) -> None:
        self._config = state.config
        self._table = state.table
        self._joining = state.joining
        self._access = state.access
        self._admission = state.admission
        self._dispatcher = dispatcher
        self._reading = Reading(state, dispatcher, prompt_work)
        self._upstream = upstream
        self._suspect = suspect
        self._limits = RelayLimits(self._config.keepalive_s, self._config.chunk_gap_timeout_s)
        self._migrator = Migrator(state.table, dispatcher, upstream, suspect=suspect, count=state.metrics.migrated,
                                  limits=MigrationLimits(
                                      self._limits, self._config.max_migrations, self._config.max_retries + 1,
                                      self._config.first_byte_timeout_s))
        self._request_log = RequestLog(__name__, state.metrics.observe)
        state.metrics.before_read = self._request_log.flush
        state.metrics.add(PromptMemoryCollector(state.joining, self._reading.beginnings, self._reading.replies))
        self._beginning = Beginning(self._config, upstream, count_hedge=state.metrics.hedged)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False
        self.express = Express(
            state, reading=self._reading, dispatcher=dispatcher, upstream=upstream,
            address=self._upstream_request, ended=self._ended, suspect=suspect)

    @property
    def num_inflight(self) -> int:
        """Requests that have no whole answer yet."""
        return len(self._tasks) + self.express.num_under_way

    def cut_short(self) -> None:
        """End what still runs, each with an error that its client can read."""
        self._is_stopping = True
        self.express.cut_short()
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Write what has not been logged yet."""
        self._request_log.flush()

    async def chat(self, request: BaseRequest, routes: Routes) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._serve(request, CHAT, routes.common_headers(request))

    async def completions(self, request: BaseRequest, routes: Routes) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._serve(request, COMPLETIONS, routes.common_headers(request))

    async def embeddings(self, request: BaseRequest, routes: Routes) -> web.StreamResponse:
        """POST /v1/embeddings."""
        return await self._serve(request, EMBEDDINGS, routes.common_headers(request))

    async def foreign(self, request: BaseRequest, routes: Routes, api: ForeignApi) -> web.StreamResponse:
        """POST /v1/messages and /v1/responses: chat requests in other words."""
        with errors_of(api):
            return await self._serve(request, FOREIGN[api.path], routes.common_headers(request))

    async def _serve(self, request: BaseRequest, route: GenerateRoute,
                     headers: Mapping[str, str]) -> web.StreamResponse:
        begun = take_begun(request)
        if begun is None:
            record = RequestRecord(request_id_of(request), route.path, client=self._access.client_of(request))
        else:
            record = begun.record
            set_request_id(request, record.request_id)
            headers = begun.headers
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._tasks.add(task)
        try:
            return await self._answer(request, Going(route, record, headers, begun))
        except ApiError as error:
            record.refused(error)
            raise
        except asyncio.CancelledError:
            if not self._is_stopping:
                record.status, record.outcome = CLIENT_CLOSED_REQUEST, "client_left"
                raise
            stopping = errors.gateway_stopping()
            record.refused(stopping)
            if record.ttft_s is not None:
                raise  # a part of it may be with the client already
            task.uncancel()
            raise stopping from None
        except (ClientLeft, ConnectionError):
            record.status, record.outcome = CLIENT_CLOSED_REQUEST, "client_left"
            raise
        finally:
            self._tasks.discard(task)
            self._ended(record)
            del task  # what is raised holds this frame, and the task what was raised

    def _ended(self, record: RequestRecord) -> None:
        duration_s = time.monotonic() - record.began_at
        self._dispatcher.learning.ended(record)
        self._request_log.add(record, duration_s)

    async def _answer(self, request: BaseRequest, going: Going) -> web.StreamResponse:
        begun, record = going.begun, going.record
        tenant = self._access.tenant_of(request) if begun is None else begun.facts.tenant
        record.tenant = tenant.tenant_id or None
        with self._admission.enter(tenant, record) if begun is None else begun.boarded() as visit:
            may_move = wants_migration(request.headers.get(MIGRATION_HEADER))
            intake = None if begun is None else begun.intake
            if intake is None:
                visit.set_deadline(request.headers.get(DEADLINE_HEADER))
                intake = await self._read(request, going, tenant, visit)
                await visit.turn(self._reading.ask(intake))
            elif not visit.has_place:
                await visit.wait(self._reading.ask(intake))
            answering = Answering(
                record, going.headers, visit.first_byte_limit_s(self._config.first_byte_timeout_s), may_move,
                Watch(lambda: self._is_stopping, ends_at=record.began_at + self._config.total_timeout_s))
            if begun is not None and begun.stream is not None:
                return await self._go_on(request, intake, answering, begun)
            return await self._from_a_worker(request, intake, answering,
                                             Walk(begun=None if begun is None else begun.placement))

    async def _go_on(self, request: BaseRequest, intake: Intake, answering: Answering,
                     begun: Passenger) -> web.StreamResponse:
        """A stream that the express lane has begun."""
        placement, exchange, stream = begun.placement, begun.exchange, begun.stream
        assert placement is not None
        assert exchange is not None
        assert stream is not None
        response = BegunStream(request)
        client = ClientStream(request, response, stream.sender.last)
        stream.so_far.shortcut.send_through(client.send_now)
        try:
            return await self._pass_stream(intake, answering, Taken(placement, FirstAnswer(exchange, b"")), Passing(
                response, client.write, client.send_now, stream.so_far.transcript, stream.so_far))
        finally:
            exchange.close()
            placement.release()

    async def _read(self, request: BaseRequest, going: Going, tenant: Tenant, visit: Visit) -> Intake:
        seen = {REQUEST_ID_HEADER: going.record.request_id, **passed_on_headers(request.headers)}
        body = await read_body(request, self._config.max_body_bytes)
        intake = await self._reading.take_in(Given(body, going.route, going.record, tenant, seen, visit))
        if intake.way_back is not None:
            set_way_back(request, intake.way_back)
        return intake

    async def _from_a_worker(self, request: BaseRequest, intake: Intake, answering: Answering,
                             walk: Walk) -> web.StreamResponse:
        record = answering.record
        choosing = Choosing(self._dispatcher, intake.routed, record, suspect=self._suspect,
                            address=lambda endpoint: self._upstream_request(intake, endpoint))
        try:
            while True:
                taken = await self._beginning.begin(choosing, answering, walk, is_stream=intake.parsed.stream)
                try:
                    return await self._from_one(request, intake, answering, taken)
                except AttemptFailed as failure:  # it broke off, and the client has seen nothing of it
                    walk.failed(taken.placement.endpoint_id, failure)
        except AttemptFailed as failure:
            self._suspect_last(record, failure)
            return _last_word(failure, record, way_back(request))

    async def _from_one(self, request: BaseRequest, intake: Intake, answering: Answering,
                        taken: Taken) -> web.StreamResponse:
        record, placement, answer = answering.record, taken.placement, taken.answer
        try:
            answer_began(record, placement, answer.response)
            return await self._pass_on(request, intake, answering, taken)
        except AttemptFailed as failure:
            placement.failed(failure.reason)
            raise
        finally:
            answer.response.close()
            placement.release()

    async def take_in(self, given: Given) -> Intake:
        """See Reading."""
        return await self._reading.take_in(given)

    def explain(self, intake: Intake) -> dict[str, Any]:
        """What would be decided for this request now."""
        return self._dispatcher.explain(intake.routed)

    def reference(self, model: str, tenant: Tenant) -> ModelReference:
        """See Reading."""
        return self._reading.reference(model, tenant)

    def _upstream_request(self, intake: Intake, endpoint: Endpoint,
                          choice: ChoiceToResume | None = None) -> UpstreamRequest:
        return upstream_request(intake, endpoint, worker_token=self._config.worker_token, choice=choice,
                                tells_token_ids=intake.learn is not None or
                                (intake.parsed.stream and self._migrator.is_on))

    async def _pass_on(self, request: BaseRequest, intake: Intake, answering: Answering,
                       taken: Taken) -> web.StreamResponse:
        response = taken.answer.response
        content_type = response.headers.get("content-type", JSON_TYPE)
        headers = {"Content-Type": content_type, **answering.headers}
        if self._config.expose_routing:
            tell_routing(headers, taken.placement)
        if response.status == 200 and is_event_stream(content_type):
            return await self._stream(request, intake, replace(answering, headers=headers), taken)
        return await self._whole(request, taken, answering, headers, learn=intake.learn)

    async def _stream(self, request: BaseRequest, intake: Intake, answering: Answering,
                      taken: Taken) -> web.StreamResponse:
        response = EventStream(headers={**STREAM_HEADERS, **answering.headers})
        await response.prepare(request)
        client = ClientStream(request, response)
        way = way_back(request)
        write: Write = client.write if way is None else way.writer(client.write, answering.record)
        return await self._pass_stream(intake, answering, taken, Passing(
            response, write, client.send_now if way is None else None,
            Transcript() if tells_tokens(taken.answer) else None))

    async def _pass_stream(self, intake: Intake, answering: Answering, taken: Taken,
                           passing: Passing) -> web.StreamResponse:
        answer, placement = taken.answer, taken.placement
        write, transcript, scheme = passing.write, passing.transcript, placement.endpoint.scheme
        may_move = answering.may_move and transcript is not None
        watch = replace(answering.watch, is_lost=placement.is_lost) if may_move else answering.watch
        end = await pass_stream(answer, write, self._limits, watch, transcript=transcript,
                                send_now=passing.send_now, so_far=passing.so_far)
        if end.failure is None:
            placement.succeeded()
            learn_from_stream(intake.learn, transcript)
        if end.can_move:
            placement.failed("lost")
            end = await self._migrator.go_on(Broken(
                intake.routed, transcript if may_move else None, end, placement.endpoint_id, scheme,
                answering.record, lambda endpoint, choice: self._upstream_request(intake, endpoint, choice),
                intake.parsed.include_usage, answering.watch), write)
        answering.record.stream_ended(end)
        await end_stream(end, write, lambda error: orjson.dumps(error.body()), self._limits)
        await passing.response.write_eof()
        return passing.response

    async def _whole(self, request: BaseRequest, taken: Taken, answering: Answering,
                     headers: Mapping[str, str], *, learn: Learn | None) -> web.StreamResponse:
        answer, placement, record = taken.answer, taken.placement, answering.record
        body, is_complete = await read_whole(answer, self._limits, answering.watch)
        body = answer_ended(record, placement, answer.response, body, is_complete=is_complete, learn=learn)
        if (way := way_back(request)) is not None:
            body, is_complete = way.whole(answer.response.status, body, is_complete=is_complete), True
        if is_complete:
            return WholeResponse(answer.response.status, body, headers)
        await (response := UnmeasuredResponse(status=answer.response.status, headers=headers)).prepare(request)
        write = ClientStream(request, response).write
        await relay_bytes(body, write, self._limits)
        try:
            await relay_rest(answer, write, self._limits, answering.watch)
        except UpstreamFailure as lost:
            record.outcome, record.error = "worker_error", lost.kind.value
            raise ClientLeft("its answer broke off and had to be cut short") from lost
        await response.write_eof()
        return response

    def _suspect_last(self, record: RequestRecord, failure: AttemptFailed) -> None:
        if record.worker_id is not None:
            self._suspect(record.worker_id)
        _log.warning("request_failed_on_every_worker_tried", request_id=record.request_id, worker=record.worker_id,
                     reason=failure.reason, retries=record.retries)


def _last_word(failure: AttemptFailed, record: RequestRecord, way: Way | None) -> WholeResponse:
    """Nobody took the request: the last worker's own refusal as it came, or our error."""
    outcome = failure.outcome
    if isinstance(outcome, ApiError):
        raise outcome
    assert isinstance(outcome, Refusal)
    record.status, record.outcome, record.error = outcome.status, "client_error", QUEUE_FULL
    headers = {"Content-Type": outcome.content_type}
    if outcome.retry_after is not None:
        headers["Retry-After"] = outcome.retry_after
    body = outcome.body if way is None else way.whole(outcome.status, outcome.body, is_complete=True)
    return WholeResponse(outcome.status, body, headers)
