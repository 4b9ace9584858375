"""Whose turn it is: requests wait here while every worker that serves their model is full.

Owns: the tenants' meters, a queue for each model, and the places that requests hold at workers. Must never: choose a
worker, or keep a prompt. What is decided is decided in gateway.admission; here are the clock and the waiting.

A place is taken before a worker is chosen and given back when the answer has ended, so no more requests are under way
than the ready workers have places for. With no worker ready nothing waits: the dispatcher then says why. Where there
are tenants, one alone leaves some places to others.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable

from msgspec import Struct

from gateway import errors
from gateway.admission.limits import Limit, Meters, OverLimit
from gateway.admission.line import Line
from gateway.admission.places import Places
from gateway.admission.queue import FairQueue, Waiting
from gateway.admission.tenants import Tenant
from gateway.config import GatewayConfig
from gateway.knowledge.endpoint_table import EndpointTable
from gateway.server.client_headers import DEADLINE_HEADER
from gateway.server.request_record import RequestRecord
from gateway.shared.membership import Membership
from gateway.shared.shared_meters import Meter, SharedMeters
from worker.protocol.api_error import invalid_request

DEADLINE_MAX_MS = 86_400_000
AGEING_S = 10.0
# Workers come and go without a word to the queue; while somebody waits it looks by itself.
LOOK_AGAIN_S = 0.1


class Ask(Struct, frozen=True):
    """What one request wants. `predict_ttft_s` is called only where a limit depends on it; None: unknown."""

    model: str
    prompt_tokens: int
    cost_tokens: int
    num_bytes: int
    priority: int
    predict_ttft_s: Callable[[], float | None]


def wall_offset_s() -> float:
    """The time of day, in seconds since 1970, less the instants that limits are asked with."""
    return time.time() - time.monotonic()


def _over(over: OverLimit) -> errors.Rejected:
    return errors.rate_limited(over.limit.value, over.retry_after_s, is_budget=over.limit is Limit.BUDGET)


class _Line(Line):
    """A line, and the futures that its requests await."""

    def __init__(self, config: GatewayConfig, places: Places) -> None:
        super().__init__(FairQueue(max_requests=config.max_queued_requests, max_bytes=config.max_queued_bytes,
                                   ageing_s=AGEING_S, catch_up_tokens=config.catch_up_tokens,
                                   head_start_tokens=config.head_start_tokens),
                         places, reserved_ratio=config.reserved_places_ratio)
        self.waiters: dict[int, asyncio.Future[None]] = {}


class Visit:
    """One request from its arrival to its end."""

    __slots__ = ("_admission", "_line", "_meter", "_record", "_tenant", "deadline_at")

    def __init__(self, admission: Admission, tenant: Tenant, meter: Meter, record: RequestRecord) -> None:
        self._admission = admission
        self._tenant = tenant
        self._meter = meter
        self._record = record
        self._line: _Line | None = None
        self.deadline_at: float | None = None

    def set_deadline(self, text: str | None) -> None:
        """From the client's header: milliseconds after its arrival by which the answer must begin."""
        if text is None:
            return
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:12]) <= DEADLINE_MAX_MS and len(text) <= 12):
            raise invalid_request(f"Should be a number from 1 to {DEADLINE_MAX_MS}.", DEADLINE_HEADER)
        self.deadline_at = self._record.began_at + int(text) / 1000

    def first_byte_limit_s(self, limit_s: float) -> float:
        """How long a worker may take to begin: `limit_s`, or what is left until the deadline."""
        if self.deadline_at is None:
            return limit_s
        return max(0.001, min(limit_s, self.deadline_at - time.monotonic()))

    def refuse_early(self, model: str, priority: int, num_bytes: int) -> None:
        """ApiError 429 when the queue will have no room for this request, however few tokens it turns out to have: of
        a flood, what cannot be served costs no tokenising."""
        self._admission.refuse_early(self._admission.line_of(model), self._tenant, priority, num_bytes)

    async def turn(self, ask: Ask) -> None:
        """Await a place at a worker. ApiError 429 when a limit, the queue, the deadline or the SLO says no."""
        if not self.turn_at_once(ask):
            await self.wait(ask)

    def turn_at_once(self, ask: Ask) -> bool:
        """Take the prompt's tokens, and a place if one is free and nobody is before us. ApiError 429."""
        now = time.monotonic()
        if (over := self._meter.take_prompt(ask.prompt_tokens, now)) is not None:
            raise _over(over)
        line = self._admission.line_of(ask.model)
        if not self._admission.place_at_once(line, ask, self._tenant, self.deadline_at):
            return False
        self._line, self._record.queued_s = line, 0.0
        return True

    @property
    def has_place(self) -> bool:
        """Whether it holds a place at a worker."""
        return self._line is not None

    async def wait(self, ask: Ask) -> None:
        """Await a place, after turn_at_once() has found none."""
        now, line = time.monotonic(), self._admission.line_of(ask.model)
        await self._admission.await_place(line, ask, self._tenant, self.deadline_at)
        self._line = line
        self._record.queued_s = time.monotonic() - now

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """The answer has ended, or the request never had one."""
        self._meter.leave()
        # A stream without usage is counted by its chunks, of one token or a few.
        self._meter.take_output(self._record.completion_tokens or self._record.num_chunks, time.monotonic())
        if self._line is not None:
            self._admission.give_back(self._line, self._tenant.tenant_id)


class Admission:
    """Lives on the event loop."""

    def __init__(self, config: GatewayConfig, table: EndpointTable, membership: Membership | None = None) -> None:
        self._config = config
        self._table = table
        self._membership = membership
        self._meters: Meters | SharedMeters = (Meters(wall_offset_s=wall_offset_s()) if membership is None
                                               else membership.meters)
        self._lines: dict[str, _Line] = {}
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return sum(len(line.queue) for line in self._lines.values())

    def enter(self, tenant: Tenant, record: RequestRecord) -> Visit:
        """From arrival to end: a `with` block's, or somebody's who calls end(). ApiError 429 when the tenant has too
        many at once, or too many a minute."""
        now = time.monotonic()
        meter = self._meters.of(tenant, now)
        if (over := meter.enter(now)) is not None:
            raise _over(over)
        return Visit(self, tenant, meter, record)

    def line_of(self, model: str) -> _Line:
        """The line for a model that some worker serves: as many as there are such models."""
        line = self._lines.get(model)
        if line is None:
            places = Places() if self._membership is None else self._membership.places(model)
            line = self._lines[model] = _Line(self._config, places)
        return line

    def place_at_once(self, line: _Line, ask: Ask, tenant: Tenant, deadline_at: float | None) -> bool:
        """Whether a place was free, and is taken now; it must be given back."""
        if not line.take_at_once(self._entry(ask, tenant, deadline_at), self._limit(ask.model)):
            return False
        try:
            self._refuse_hopeless(ask, 0.0, None if deadline_at is None else deadline_at - time.monotonic())
        except errors.Rejected:
            self.give_back(line, tenant.tenant_id)
            raise
        return True

    async def await_place(self, line: _Line, ask: Ask, tenant: Tenant, deadline_at: float | None) -> None:
        """Returns with a place taken; it must be given back."""
        now = time.monotonic()
        wait_s = self._expected_wait_s(line, tenant)
        self._refuse_hopeless(ask, wait_s, None if deadline_at is None else deadline_at - now)
        await self._stand_in_line(line, self._entry(ask, tenant, deadline_at), wait_s)

    def _entry(self, ask: Ask, tenant: Tenant, deadline_at: float | None) -> Waiting:
        now = time.monotonic()
        latest = now + self._config.max_queue_wait_s
        return Waiting(tenant.tenant_id, ask.cost_tokens, ask.num_bytes, now, tenant.limits.weight, ask.priority,
                       latest if deadline_at is None else min(latest, deadline_at))

    async def _stand_in_line(self, line: _Line, entry: Waiting, wait_s: float) -> None:
        pushed_out = line.queue.offer(entry, line.places.elsewhere())
        if pushed_out is None:
            raise self._full(wait_s)
        for victim in pushed_out:
            self._end_wait(line, victim, self._full(wait_s))
        line.rate.began(entry.arrived_at)
        await self._wait(line, entry, asyncio.get_running_loop().create_future())

    def refuse_early(self, line: _Line, tenant: Tenant, priority: int, num_bytes: int) -> None:
        """See Visit."""
        if not len(line.queue):
            return
        newcomer = Waiting(tenant.tenant_id, 0, num_bytes, time.monotonic(), tenant.limits.weight, priority)
        if line.queue.is_hopeless(newcomer, line.places.elsewhere()):
            raise self._full(self._expected_wait_s(line, tenant))

    def give_back(self, line: _Line, tenant_id: str) -> None:
        """A place is free again; it is the turn of those who wait here or in another process, by lot."""
        line.give_back(tenant_id)
        row = line.places.next_turn(random.random())
        if row is not None and self._membership is not None:
            self._membership.notes.your_turn(row)
        elif self._look_again is not None:   # as long as anybody waits
            self.call_next()

    async def _wait(self, line: _Line, entry: Waiting, waiter: asyncio.Future[None]) -> None:
        line.waiters[id(entry)] = waiter
        self.call_next()
        try:
            await waiter
        except asyncio.CancelledError:
            # The client left. If its turn came in this very moment, the place goes to the next.
            if line.queue.remove(entry):
                line.queue_changed()
            elif waiter.done() and not waiter.cancelled() and not waiter.exception():
                self.give_back(line, entry.tenant_id)
            raise
        finally:
            line.waiters.pop(id(entry), None)

    def call_next(self) -> None:
        """Give every free place to whoever is next, and end the wait of those whose time is over."""
        now = time.monotonic()
        for model, line in self._lines.items():
            if not len(line.queue):
                continue
            for late in line.queue.expired(now):
                self._end_wait(line, late, self._too_late(late, now))
            limit = self._limit(model)
            while (entry := line.take_next(limit)) is not None:
                line.rate.left(entry.cost_tokens, now, queue_is_empty=not len(line.queue))
                self._end_wait(line, entry, None)
            line.queue_changed()
        if self._look_again is not None:
            self._look_again.cancel()
        self._look_again = asyncio.get_running_loop().call_later(
            LOOK_AGAIN_S, self.call_next) if self.num_waiting else None

    def _end_wait(self, line: _Line, entry: Waiting, error: errors.Rejected | None) -> None:
        waiter = line.waiters.pop(id(entry))
        if waiter.done():  # cancelled, and its task has not run since: what it got goes to the next
            if error is None:
                line.give_back(entry.tenant_id)
        elif error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    def _limit(self, model: str) -> int:
        """Places there are. Without a worker there is nothing to wait for: the dispatcher says why nobody can."""
        return len(self._table.serving(model)) * self._config.max_inflight_per_worker or sys.maxsize

    def _expected_wait_s(self, line: _Line, tenant: Tenant) -> float:
        """Behind what is in line; 0 while the pace is unknown."""
        return line.rate.seconds_for(line.queue.tokens_before(tenant.tenant_id, tenant.limits.weight)) or 0.0

    def _refuse_hopeless(self, ask: Ask, wait_s: float, left_s: float | None) -> None:
        slo_s = self._config.ttft_slo_s
        if slo_s is None and left_s is None:
            return
        ttft_s = wait_s + (ask.predict_ttft_s() or 0.0)
        if left_s is not None and ttft_s > left_s:
            raise errors.deadline_too_soon(wait_s)
        if slo_s is not None and ttft_s > slo_s:
            raise errors.queue_full(f"The answer would not begin within {slo_s:g} s", "slo", ttft_s - slo_s)

    def _full(self, wait_s: float) -> errors.Rejected:
        return errors.queue_full("Too many requests wait for a worker", "queue_full", wait_s)

    def _too_late(self, late: Waiting, now: float) -> errors.Rejected:
        waited_s = now - late.arrived_at
        if late.deadline_at is not None and late.deadline_at < late.arrived_at + self._config.max_queue_wait_s:
            return errors.deadline_too_soon(waited_s)   # it was the client's own
        return errors.queue_full("No worker had a place in time", "queue_wait", waited_s)
