"""The express lane: requests that go their whole way on the event loop without a task of their own.

Each takes the same steps as in generate.py, through the same code, as long as none of them has to wait for anything
but the worker's answer: a head that is known, a prompt that is short or known, a place that is free, a kept
connection, and an answer that is there as a whole. Wherever something else happens the request is handed over, as far
as it has come, to the usual way: aiohttp parses it, and generate.py goes on where it stands.

Owns: requests between their arrival and one of these ends. Must never: wait, or decide anything by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import orjson

from gateway import errors
from gateway.knowledge.endpoint_table import Endpoint
from gateway.relay.connection import Exchange
from gateway.relay.connection_pool import PooledUpstream
from gateway.relay.retry import LOST_LOOK_S, AttemptFailed, is_coded
from gateway.relay.sse import error_event, is_event_stream
from gateway.relay.upstream import UpstreamRequest
from gateway.server.admission import Visit
from gateway.server.arrival import HeadFacts
from gateway.server.client_headers import REQUEST_ID_HEADER
from gateway.server.companions import Companions
from gateway.server.dispatch import Choosing, Dispatcher
from gateway.server.express_client import Client
from gateway.server.express_stream import SILENT_MAX_S, LaneStream, begin_stream
from gateway.server.http import CLIENT_CLOSED_REQUEST, new_request_id
from gateway.server.placement import Placement
from gateway.server.raw_response import STREAM_HEADERS, ChunkSender
from gateway.server.reading import Given, Intake, Plan, Reading
from gateway.server.replies import learn_from_stream
from gateway.server.request_record import RequestRecord
from gateway.server.state import GatewayState
from gateway.server.whole_answer import JSON_TYPE, answer_began, answer_ended, tell_routing
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

# Whoever has waited so long for a worker gets a task, which has a limit of its own to watch.
WAIT_MAX_S = 2.0
_log = get_logger(__name__)


class Express:
    """Lives on the event loop. `address` says what is sent to a worker, `ended` accounts for a finished request."""

    def __init__(self, state: GatewayState, *, reading: Reading, dispatcher: Dispatcher, upstream: PooledUpstream,
                 address: Callable[[Intake, Endpoint], UpstreamRequest], ended: Callable[[RequestRecord], None],
                 suspect: Callable[[str], None]) -> None:
        self.config = state.config
        self.access = state.access
        self.admission = state.admission
        self.count = state.metrics.express
        self.reading = reading
        self.dispatcher = dispatcher
        self.upstream = upstream
        self.address = address
        self.ended = ended
        self.suspect = suspect
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[Passenger, None] = {}
        self._departing = Companions(self._depart_all)
        self._arriving = Companions(self._arrive_all)
        self._look: asyncio.TimerHandle | None = None
        config = state.config
        self.takes_streams = min(config.keepalive_s, config.chunk_gap_timeout_s) > SILENT_MAX_S + LOST_LOOK_S

    @property
    def num_under_way(self) -> int:
        """Requests that await a worker."""
        return len(self._under_way)

    def board(self, client: Client, facts: HeadFacts, data: bytes, body: bytes) -> Passenger:
        """Take a request, of which `data` is everything."""
        record = RequestRecord(facts.request_id or new_request_id(), facts.route.path, client=self.access.client_at(
            client.client_address, facts.forwarded_for, facts.forwarded))
        passenger = Passenger(self, client, facts, record, body=body, data=data)
        self._under_way[passenger] = None
        return passenger

    def depart(self, passenger: Passenger) -> None:
        """It has boarded, and its connection knows it."""
        self._departing.add(passenger, is_alone=len(self._under_way) == 1)

    def arrived(self, passenger: Passenger) -> None:
        """Its whole answer is here."""
        self._arriving.add(passenger, is_alone=len(self._under_way) == 1)

    def stream_ended(self, passenger: Passenger) -> None:
        """All of its stream has gone to its client."""
        for step in _STREAM_END:
            self._take_step([passenger], step)

    def _depart_all(self, passengers: list[Passenger]) -> None:
        for step in _DEPARTURE:
            passengers = self._take_step(passengers, step)
        if self._look is None and self._under_way:
            self._look = self._loop.call_later(LOST_LOOK_S, self._look_at_all)

    def _arrive_all(self, passengers: list[Passenger]) -> None:
        for step in _ARRIVAL:
            passengers = self._take_step(passengers, step)

    def _take_step(self, passengers: list[Passenger], step: Callable[[Passenger], bool]) -> list[Passenger]:
        """For each of them; those who have more to do here."""
        going_on, under_way = [], self._under_way
        for passenger in passengers:
            if passenger not in under_way:
                continue
            try:
                goes_on = step(passenger)
            except ApiError as error:
                passenger.refuse(error)
            except Exception:
                record = passenger.record
                _log.exception("internal_error", request_id=record.request_id, path=record.route)
                passenger.refuse(errors.internal_error(record.request_id))
            else:
                if goes_on:
                    going_on.append(passenger)
                else:
                    passenger.hand_over()
        return going_on

    def left(self, passenger: Passenger, outcome: str) -> None:
        """It is in the lane no more."""
        if passenger in self._under_way:
            del self._under_way[passenger]
            self.count(outcome)

    def cut_short(self) -> None:
        """Answer whoever still waits: the gateway stops."""
        for passenger in list(self._under_way):
            passenger.refuse(errors.gateway_stopping())

    def _look_at_all(self) -> None:
        """One timer for all: who has waited long, or for a worker that is lost, needs a task's patience."""
        self._look = None
        now = time.monotonic()
        for passenger in list(self._under_way):
            if passenger.is_overdue(now):
                passenger.hand_over()
        if self._under_way:
            self._look = self._loop.call_later(LOST_LOOK_S, self._look_at_all)


class Passenger:
    """One request, as far as it has come: it has a visit once its tenant's limits let it in, an intake once it has
    been read, and a placement once a worker has been chosen.

    A step returns False where the rest is for the usual way; it raises ApiError for what is refused.
    """

    __slots__ = ("_answer", "_body", "_client", "_express", "_given", "_plan", "data", "exchange", "facts",
                 "intake", "placement", "record", "stream", "visit")

    def __init__(self, express: Express, client: Client, facts: HeadFacts, record: RequestRecord, *, body: bytes,
                 data: bytes) -> None:
        self._express = express
        self._client = client
        self._body = body
        self.facts = facts
        self.data = data
        self.record = record
        self.visit: Visit | None = None
        self.intake: Intake | None = None
        self.placement: Placement | None = None
        self.exchange: Exchange | None = None
        self.stream: LaneStream | None = None
        self._given: Given | None = None
        self._plan: Plan | None = None
        self._answer = b""

    @property
    def headers(self) -> dict[str, str]:
        """Of its answer, whatever that is."""
        return {REQUEST_ID_HEADER: self.record.request_id, **self.facts.headers}

    # ---- on the way to a worker ----------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Its tenant's limits let it in."""
        facts, record = self.facts, self.record
        record.tenant = facts.tenant.tenant_id or None
        self.visit = self._express.admission.enter(facts.tenant, record)
        self.visit.set_deadline(facts.deadline)
        return True

    def parse(self) -> bool:
        """Its body is understood."""
        facts, record = self.facts, self.record
        passed_on = {REQUEST_ID_HEADER: record.request_id, **facts.passed_on}
        self._given = Given(self._body, facts.route, record, facts.tenant, passed_on, self.visit)
        self._plan = self._express.reading.plan_at_once(self._given)
        return self._plan is not None

    def tokenise(self) -> bool:
        """And has become tokens and hashes."""
        assert self._given is not None, "parsed before"
        assert self._plan is not None, "parsed before"
        self.intake = self._express.reading.take_in_at_once(self._given, self._plan)
        return self.intake is not None

    def choose(self) -> bool:
        """It takes a place, and a worker is chosen and booked."""
        express, intake, visit = self._express, self.intake, self.visit
        assert intake is not None, "tokenised before"
        assert visit is not None, "entered before"
        if not visit.turn_at_once(express.reading.ask(intake)):
            return False
        if intake.parsed.stream and express.config.hedge_after_s is not None:
            return False
        self.placement = Choosing(express.dispatcher, intake.routed, self.record, suspect=express.suspect,
                                  address=lambda endpoint: express.address(intake, endpoint))(frozenset(), None)
        return True

    def send(self) -> bool:
        """It is on its way."""
        upstream, placement = self._express.upstream, self.placement
        assert placement is not None, "a first choice is a worker or a refusal"
        request = placement.upstream_request
        exchange = upstream.send_at_once(request)
        # Without a kept connection it gets a new one, though others may be free by then: so the next has one to take.
        placement.asked(lambda: upstream.follow(exchange, request))
        if exchange is None:
            return False
        self.exchange, exchange.on_news = exchange, self._news
        return True

    # ---- and back ------------------------------------------------------------------------------------------------

    def _news(self) -> None:
        """Something has arrived from the worker, or an end."""
        exchange = self.exchange
        assert exchange is not None, "news of what was never sent"
        body = exchange.whole()
        if body and exchange.status == 200 and _is_plain_json(exchange.headers):
            exchange.on_news, self._answer = None, body
            self._express.arrived(self)
        elif exchange.has_body_or_end and not self._stream_begins(exchange):
            self.hand_over()

    def _stream_begins(self, exchange: Exchange) -> bool:
        """Whether what has come is a stream's usual beginning, which is now with the client."""
        placement, record = self.placement, self.record
        assert placement is not None, "sent without a placement"

        def begin(data: bytes) -> ChunkSender | None:
            headers = self._headers_of_answer(exchange, placement)
            headers.update(STREAM_HEADERS)
            return self._client.begin_stream(headers, data)

        if self._express.takes_streams:
            self.stream = begin_stream(exchange, begin)
        if self.stream is None:
            return False
        exchange.on_news = self._stream_news
        answer_began(record, placement, exchange)
        return True

    def _stream_news(self) -> None:
        """Something has come that the stream's shortcut does not take, or an end."""
        assert self.exchange is not None
        assert self.stream is not None
        if self.stream.is_done(self.exchange):
            self._express.stream_ended(self)
        else:
            self.hand_over()

    def end_stream(self) -> bool:
        """The client has all of its stream."""
        placement, intake, stream = self.placement, self.intake, self.stream
        assert placement is not None
        assert intake is not None
        assert stream is not None
        placement.succeeded()
        learn_from_stream(intake.learn, stream.so_far.transcript)
        self.record.stream_ended(stream.end(None))
        self._client.end_stream(b"")
        return True

    def answer(self) -> bool:
        """The client has its answer."""
        placement, record, intake, exchange = self.placement, self.record, self.intake, self.exchange
        assert placement is not None
        assert intake is not None
        assert exchange is not None
        try:
            answer_began(record, placement, exchange)
            body = answer_ended(record, placement, exchange, self._answer, is_complete=True, learn=intake.learn)
        except AttemptFailed:
            return False
        self._client.answer(200, self._headers_of_answer(exchange, placement), body)
        return True

    def _headers_of_answer(self, exchange: Exchange, placement: Placement) -> dict[str, str]:
        headers = self.headers
        headers["Content-Type"] = exchange.headers.get("content-type", JSON_TYPE)
        if self._express.config.expose_routing:
            tell_routing(headers, placement)
        return headers

    def end(self) -> bool:
        """What it held is given back, and accounted for."""
        self._leave("answered")
        if self.placement is not None:
            self.placement.release()
        if self.visit is not None:
            self.visit.end()
        self._express.ended(self.record)
        return True

    # ---- other ends ----------------------------------------------------------------------------------------------

    def boarded(self) -> Visit:
        """Its visit, which now is whose hands it is in."""
        assert self.visit is not None, "nobody is handed over before it has been let in"
        visit, self.visit = self.visit, None
        return visit

    def is_overdue(self, now: float) -> bool:
        """Whether it has waited long, or for a worker that is lost; of a stream: is it silent or out of time?"""
        if self.stream is not None:
            ends_at = self.record.began_at + self._express.config.total_timeout_s - SILENT_MAX_S
            return self.stream.is_silent(now) or now > ends_at
        limit_s = min(WAIT_MAX_S, self._express.config.first_byte_timeout_s - LOST_LOOK_S)
        if self.visit is not None and self.visit.deadline_at is not None:
            limit_s = min(limit_s, self.visit.deadline_at - LOST_LOOK_S - self.record.began_at)
        is_lost = self.placement is not None and self.placement.is_lost()
        return is_lost or now - self.record.began_at > limit_s

    def hand_over(self) -> None:
        """The usual way goes on from here."""
        self._leave("handed_over")
        self._client.hand_over(self)

    def refuse(self, error: ApiError) -> None:
        """The request ends in this error."""
        if self.stream is not None:
            self._break_off(self.stream, error)
            return
        self.record.refused(error)
        self._drop("refused")
        headers = {"Content-Type": JSON_TYPE, **error.headers, **self.headers}
        self._client.answer(error.status, headers, orjson.dumps(error.body()))
        self._express.ended(self.record)

    def _break_off(self, stream: LaneStream, error: ApiError) -> None:
        """Its client reads of the error behind what it has."""
        self.record.stream_ended(stream.end(error))
        self._drop("refused")
        event = error_event(orjson.dumps(error.body()))
        self._client.end_stream(b"%x\r\n%b\r\n" % (len(event), event))
        self._express.ended(self.record)

    def client_left(self) -> None:
        """The connection is gone; whatever was under way ends."""
        self.record.status, self.record.outcome = CLIENT_CLOSED_REQUEST, "client_left"
        self._drop("left")
        self._express.ended(self.record)

    def _leave(self, outcome: str) -> None:
        self._express.left(self, outcome)
        if self.exchange is not None:
            self.exchange.on_news = None
            if self.stream is not None:
                self.exchange.hold()

    def _drop(self, outcome: str) -> None:
        """Give back whatever it holds."""
        self._leave(outcome)
        if self.exchange is not None:
            self.exchange.close()
        if self.placement is not None and self.stream is not None:
            self.placement.release()
        elif self.placement is not None:
            self.placement.abandon()
        if self.visit is not None:
            self.visit.end()
            self.visit = None


def _is_plain_json(headers: Mapping[str, str]) -> bool:
    """Whether this is no stream, and nothing that has to be decoded first."""
    return not is_event_stream(headers.get("content-type", "")) and not is_coded(headers)


_DEPARTURE = (Passenger.enter, Passenger.parse, Passenger.tokenise, Passenger.choose, Passenger.send)
_ARRIVAL = (Passenger.answer, Passenger.end)
_STREAM_END = (Passenger.end_stream, Passenger.end)
