"""A worker that has been booked for a request, and every way out of that.

Owns the booking, the bet and the breaker's pass of one request at one worker. Must never: choose.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.knowledge.endpoint_table import Endpoint, EndpointState, EndpointTable
from gateway.relay.upstream import Upstream, UpstreamRequest, UpstreamResponse
from gateway.routing.load_ledger import Booking
from gateway.routing.picker import RoutingDecision
from gateway.routing.prefix_index import PrefixIndex, Speculation
from gateway.server.breakers import Breakers
from gateway.server.learning import Learning
from gateway.server.prefills import Prefills

Follow = Callable[[], Awaitable[UpstreamResponse]]


@dataclass(frozen=True, slots=True)
class Books:
    """What every placement writes to."""

    table: EndpointTable
    index: PrefixIndex
    breakers: Breakers
    learning: Learning
    prefills: Prefills


class Placement:
    """A booked worker. Every way out ends in release() or abandon(), and both may be called again.

    `model` is what was asked for; `is_stream`: its first byte is a first token, and otherwise `books.prefills` may
    know the booking.
    """

    __slots__ = ("_asked_at", "_awaits_token", "_bet", "_booked_at", "_booking", "_books", "_is_listed", "_model",
                 "_pass", "decision", "endpoint", "follow", "upstream_request")

    def __init__(self, books: Books, endpoint: Endpoint, decision: RoutingDecision, booking: Booking, *, model: str,
                 bet: Speculation | None, upstream_request: UpstreamRequest, is_stream: bool) -> None:
        self.endpoint = endpoint
        self.decision = decision
        self.upstream_request = upstream_request
        self.follow: Follow | None = None  # of one that has been asked: the way to its answer
        self._books = books
        self._pass = books.breakers.begin(endpoint)
        self._booking = booking
        self._booked_at = booking.footprint.at
        self._bet = bet
        self._model = model
        self._asked_at: float | None = None
        self._awaits_token = is_stream and decision.cost is not None
        self._is_listed = not is_stream

    @property
    def endpoint_id(self) -> str:
        """See relay.retry.Attempt."""
        return self.endpoint.endpoint_id

    @property
    def waited_s(self) -> float:
        """See relay.retry.Attempt."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def asked(self, follow: Follow) -> None:
        """The request has been sent there; `follow` awaits the answer."""
        self.follow, self._asked_at = follow, time.monotonic()

    async def open(self, upstream: Upstream) -> UpstreamResponse:
        """See relay.retry.Attempt."""
        return await (upstream.open(self.upstream_request) if self.follow is None else self.follow())

    def is_lost(self) -> bool:
        """See relay.retry.Attempt. A worker that is alone keeps its request: it may only be slow."""
        is_same_life = self.endpoint.epoch == self.decision.epoch
        if is_same_life and self.endpoint.state is not EndpointState.UNREADY:
            return False
        return bool(self._books.table.serving(self._model))

    def first_byte(self) -> None:
        """The prompt has been computed."""
        now = time.monotonic()
        self._booking.prefill_done(now)
        if self._awaits_token and self.decision.cost is not None:
            self._awaits_token = False
            self._books.learning.first_token(self.decision.cost, self._booked_at)
        self._pass.answered()
        if self._bet is not None:
            self._bet.settle(now)

    def succeeded(self) -> None:
        """The worker answered to the end."""
        self._pass.succeeded()

    def failed(self, reason: str) -> None:
        """The worker did not answer, or not to the end. What it computed may be in its cache or not."""
        self._books.breakers.failed(self.endpoint, self._pass, reason)
        self.abandon()

    def release(self) -> None:
        """The request has ended; what it left in the worker's cache is for the events to tell."""
        self._booking.release()
        if self._is_listed:
            self._is_listed = False
            self._books.prefills.ended()
        self._pass.left()
        if self._bet is not None and self._bet.is_held:
            self._bet.settle(time.monotonic())

    def abandon(self) -> None:
        """The worker did not take it: nothing of it will be in that cache."""
        self.release()
        if self._bet is not None:
            self._books.index.withdraw(self._bet)
