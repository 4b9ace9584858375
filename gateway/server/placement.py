"""A worker that has been booked for a request, and every way out of that.

Owns the booking, the bet and the breaker's pass of one request at one worker. Must never: choose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from gateway.knowledge.endpoint_table import Endpoint, EndpointState
from gateway.relay.upstream import Upstream, UpstreamRequest, UpstreamResponse
from gateway.routing.load_ledger import Booking
from gateway.routing.picker import RoutingDecision
from gateway.routing.prefix_index import PrefixIndex, Speculation
from gateway.server.breakers import Breakers

Follow = Callable[[], Awaitable[UpstreamResponse]]


class OpenBet(Struct, frozen=True, gc=False):
    """What is believed of the worker's cache for this request's sake."""

    placed_in: PrefixIndex
    speculation: Speculation

    def settle(self, now: float) -> None:
        """From now on it may expire."""
        self.speculation.settle(now)

    def withdraw(self) -> None:
        self.placed_in.withdraw(self.speculation)


class Placement:
    """A booked worker. Every way out ends in release() or abandon(), and both may be called again."""

    def __init__(self, endpoint: Endpoint, decision: RoutingDecision, booking: Booking, *,
                 bet: OpenBet | None, upstream_request: UpstreamRequest,
                 prefill_timer: asyncio.TimerHandle | None, is_replaceable: Callable[[], bool],
                 breakers: Breakers) -> None:
        self.endpoint = endpoint
        self._breakers = breakers
        self._pass = breakers.begin(endpoint)
        self.decision = decision
        self._booking = booking
        self._bet = bet
        self.upstream_request = upstream_request
        self.follow: Follow | None = None  # of one that has been asked: the way to its answer
        self._asked_at: float | None = None
        self._prefill_timer = prefill_timer
        self.on_first_token: Callable[[], None] | None = None   # of a stream
        self._is_replaceable = is_replaceable

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
        return not (is_same_life and self.endpoint.state is not EndpointState.UNREADY) and self._is_replaceable()

    def first_byte(self) -> None:
        """The prompt has been computed."""
        now = time.monotonic()
        self._booking.prefill_done(now)
        if self.on_first_token is not None:
            self.on_first_token()
            self.on_first_token = None
        self._pass.answered()
        if self._bet is not None:
            self._bet.settle(now)

    def succeeded(self) -> None:
        """The worker answered to the end."""
        self._pass.succeeded()

    def failed(self, reason: str) -> None:
        """The worker did not answer, or not to the end. What it computed may be in its cache or not."""
        self._breakers.failed(self.endpoint, self._pass, reason)
        self.abandon()

    def release(self) -> None:
        """The request has ended; what it left in the worker's cache is for the events to tell."""
        if self._prefill_timer is not None:
            self._prefill_timer.cancel()
        self._booking.release()
        self._pass.left()
        if self._bet is not None and self._bet.speculation.is_held:
            self._bet.settle(time.monotonic())

    def abandon(self) -> None:
        """The worker did not take it: nothing of it will be in that cache."""
        self.release()
        if self._bet is not None:
            self._bet.withdraw()
