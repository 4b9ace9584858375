"""The queue of requests that wait for a worker: bounded, fair between tenants, by priority within one.

Owns: who is next, who must go when it is full, and how long a newcomer should expect to wait. Must never: know the
clock or a worker.

Between tenants: start-time fair queueing. Each tenant has a virtual start; the smallest goes next, and moves on by
the tokens of the request it got, divided by its weight. Who used less than others while somebody waited may catch up,
from `catch_up_tokens` behind the present at most: a burst within what a tenant had coming goes before those who are
over their share. Of those who are level, but for `head_start_tokens`, the one with the least in line for its weight
goes next: at its first moment a flood has had no more than anybody else. Within a tenant: a lower `priority` number
first, as in vLLM, and `ageing_s` of waiting count as much as one step of priority. Everybody ages alike, so that
order never changes.

When it is full, what goes is the last in line of the tenant with the most tokens waiting for its weight, newcomer
included. So a tenant that floods the queue pushes out itself, never those who are below their share.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from msgspec import Struct

from gateway.admission.places import NOBODY_ELSEWHERE, WaitingElsewhere

PRIORITY_MAX = 1000
FLOWS_LOOK_AT = 64  # beyond so many remembered tenants it is looked who may be forgotten


class Waiting(Struct, eq=False, gc=False):
    """One request in line. `cost_tokens` is what it will ask of a worker; `deadline_at` None: it waits as it must.
    `queued` is the queue's own.
    """

    tenant_id: str
    cost_tokens: int
    num_bytes: int
    arrived_at: float
    weight: float = 1.0
    priority: int = 0
    deadline_at: float | None = None
    queued: bool = False


class _Flow:
    """One tenant's line."""

    __slots__ = ("backlog_tokens", "heap", "last_rank", "num_waiting", "virtual_start", "weight")

    def __init__(self, virtual_start: float) -> None:
        self.virtual_start = virtual_start
        self.weight = 1.0
        self.backlog_tokens = 0
        self.num_waiting = 0
        self.last_rank = -math.inf  # nobody in line ranks behind it
        self.heap: list[tuple[float, int, Waiting]] = []

    @property
    def burden(self) -> float:
        """Tokens in line, for its weight."""
        return self.backlog_tokens / self.weight

    def waiting(self) -> Iterator[tuple[float, int, Waiting]]:
        """Everybody in line, in no order; those who left are still in the heap."""
        return (item for item in self.heap if item[2].queued)


class FairQueue:
    """At most `max_requests` of at most `max_bytes` together."""

    def __init__(self, *, max_requests: int, max_bytes: int, ageing_s: float, catch_up_tokens: int = 0,
                 head_start_tokens: int = 0) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._ageing_s = ageing_s
        self._catch_up_tokens = catch_up_tokens
        self._head_start_tokens = head_start_tokens
        self._earliest_deadline_at = math.inf  # nobody's in line is earlier
        self._flows: dict[str, _Flow] = {}
        self._flows_max = FLOWS_LOOK_AT
        self._virtual_now = 0.0
        self._serials = itertools.count()
        self._num_waiting = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_waiting

    def offer(self, entry: Waiting, elsewhere: WaitingElsewhere = NOBODY_ELSEWHERE) -> list[Waiting] | None:
        """Put it in line; those who had to go for it, or None when it is the one that finds no room. What waits
        `elsewhere` counts against the bounds and cannot be pushed out from here."""
        assert not entry.queued, "in line already"
        pushed_out = self._make_room(entry, elsewhere)
        if pushed_out is None:
            return None
        for victim in pushed_out:
            self.remove(victim)
        flow = self._flow_of(entry)
        if not flow.num_waiting:
            flow.last_rank = -math.inf
        flow.last_rank = max(flow.last_rank, self._rank(entry))
        if entry.deadline_at is not None:
            self._earliest_deadline_at = min(self._earliest_deadline_at, entry.deadline_at)
        heapq.heappush(flow.heap, (self._rank(entry), next(self._serials), entry))
        self._count(flow, entry, 1)
        return pushed_out

    def pass_by(self, entry: Waiting) -> None:
        """It has its place without waiting. When nobody waits there is enough for all: nobody is behind anybody."""
        assert not entry.queued, "it waits, so take() says when it goes"
        if self._num_waiting:
            self._serve(self._flow_of(entry), entry)
        elif self._flows:
            self._flows, self._virtual_now = {}, 0.0

    def take(self, may_go: Callable[[str], bool] = lambda tenant_id: True) -> Waiting | None:
        """The next in line of a tenant that may go, out of it; None when there is none."""
        flows = [(flow.virtual_start, tenant_id) for tenant_id, flow in self._flows.items()
                 if flow.num_waiting and may_go(tenant_id)]
        if not flows:
            return None
        flow = self._next_flow(flows)
        while not flow.heap[0][2].queued:
            heapq.heappop(flow.heap)
        entry = heapq.heappop(flow.heap)[2]
        self._count(flow, entry, -1)
        self._serve(flow, entry)
        return entry

    def waits(self, tenant_id: str) -> bool:
        """Whether anybody of this tenant is in line."""
        flow = self._flows.get(tenant_id)
        return flow is not None and flow.num_waiting > 0

    def is_hopeless(self, entry: Waiting, elsewhere: WaitingElsewhere = NOBODY_ELSEWHERE) -> bool:
        """Whether offer() finds no room for it, however few tokens it asks for: that is known before they are."""
        own = self._flows.get(entry.tenant_id)
        if own is None or not own.num_waiting or self._has_room(entry, elsewhere):
            return False
        if self._rank(entry) < own.last_rank:
            return False
        return own.backlog_tokens / entry.weight >= max(flow.burden for flow in self._flows.values()
                                                        if flow.num_waiting)

    def remove(self, entry: Waiting) -> bool:
        """It leaves the line; False when it was not in it."""
        if not entry.queued:
            return False
        flow = self._flows[entry.tenant_id]
        self._count(flow, entry, -1)
        if len(flow.heap) > 2 * flow.num_waiting + 8:  # those who left are cleared away before they are the most
            flow.heap = list(flow.waiting())
            heapq.heapify(flow.heap)
        return True

    def expired(self, now: float) -> list[Waiting]:
        """Those whose deadline has come, out of the line."""
        if now < self._earliest_deadline_at:
            return []
        timed = [entry for flow in self._flows.values() for _, _, entry in flow.waiting()
                 if entry.deadline_at is not None]
        late = [entry for entry in timed if entry.deadline_at is not None and entry.deadline_at <= now]
        for entry in late:
            self.remove(entry)
        self._earliest_deadline_at = min((entry.deadline_at for entry in timed
                                          if entry.queued and entry.deadline_at is not None), default=math.inf)
        return late

    def tokens_before(self, tenant_id: str, weight: float) -> float:
        """Tokens that are served before a newcomer of this tenant: its own, and of others their share meanwhile."""
        own = self._flows.get(tenant_id)
        own_tokens = own.backlog_tokens if own is not None else 0
        # While own_tokens are served, and the newcomer is next, another tenant of the same weight gets as many; each
        # other tenant is also one request ahead at the most.
        return own_tokens + sum(min(flow.backlog_tokens, own_tokens * flow.weight / weight + self._first_cost(flow))
                                for other, flow in self._flows.items() if other != tenant_id and flow.num_waiting)

    def check_invariants(self) -> None:
        """Counts are the sums of what is in line, and within bounds."""
        entries = [entry for flow in self._flows.values() for _, _, entry in flow.waiting()]
        assert len(entries) == self._num_waiting <= self._max_requests
        assert sum(entry.num_bytes for entry in entries) == self.num_bytes <= self._max_bytes
        for tenant_id, flow in self._flows.items():
            own = [entry for _, _, entry in flow.waiting()]
            assert all(entry.tenant_id == tenant_id for entry in own)
            assert len(own) == flow.num_waiting
            assert sum(entry.cost_tokens for entry in own) == flow.backlog_tokens
            assert len(flow.heap) <= 2 * flow.num_waiting + 8

    def _next_flow(self, starts: list[tuple[float, str]]) -> _Flow:
        """The one with the least in line, of those whose virtual start is near the smallest."""
        if len(starts) == 1:
            return self._flows[starts[0][1]]
        latest = min(starts)[0] + self._head_start_tokens
        return self._flows[min((self._flows[tenant_id].burden, virtual_start, tenant_id)
                               for virtual_start, tenant_id in starts if virtual_start <= latest)[2]]

    def _make_room(self, entry: Waiting, elsewhere: WaitingElsewhere) -> list[Waiting] | None:
        """Who must go for `entry`; None when it is `entry` itself. Changes nothing."""
        if self._has_room(entry, elsewhere):
            return []
        num_left = self._num_waiting + elsewhere.num_requests + 1
        bytes_left = self.num_bytes + elsewhere.num_bytes + entry.num_bytes
        burden = {tenant_id: flow.burden for tenant_id, flow in self._flows.items() if flow.num_waiting}
        own = self._flows.get(entry.tenant_id)
        burden[entry.tenant_id] = ((own.backlog_tokens if own else 0) + entry.cost_tokens) / entry.weight
        lines: dict[str, list[Waiting]] = {}
        pushed_out: list[Waiting] = []
        while num_left > self._max_requests or bytes_left > self._max_bytes:
            heaviest = max(burden, key=lambda name: (burden[name], name == entry.tenant_id, name))
            if heaviest == entry.tenant_id and not pushed_out and own and self._rank(entry) >= own.last_rank:
                return None  # the usual case of a flood, without looking at its line
            if heaviest not in lines:
                lines[heaviest] = self._line(heaviest, entry)
            victim = lines[heaviest].pop()
            if victim is entry:
                return None
            pushed_out.append(victim)
            num_left, bytes_left = num_left - 1, bytes_left - victim.num_bytes
            burden[heaviest] -= victim.cost_tokens / victim.weight
            if not lines[heaviest]:
                del burden[heaviest]
        return pushed_out

    def _has_room(self, entry: Waiting, elsewhere: WaitingElsewhere) -> bool:
        return (self._num_waiting + elsewhere.num_requests < self._max_requests
                and self.num_bytes + elsewhere.num_bytes + entry.num_bytes <= self._max_bytes)

    def _line(self, tenant_id: str, newcomer: Waiting) -> list[Waiting]:
        """This tenant's requests from the first to the last, the newcomer included where it would stand."""
        flow = self._flows.get(tenant_id)
        items = sorted(flow.waiting(), key=lambda item: item[:2]) if flow is not None else []
        line = [entry for _, _, entry in items]
        if tenant_id == newcomer.tenant_id:
            line.insert(bisect.bisect_right([rank for rank, _, _ in items], self._rank(newcomer)), newcomer)
        return line

    def _rank(self, entry: Waiting) -> float:
        priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, entry.priority))
        return priority * self._ageing_s + entry.arrived_at

    def _count(self, flow: _Flow, entry: Waiting, sign: int) -> None:
        entry.queued = sign > 0
        flow.num_waiting += sign
        flow.backlog_tokens += sign * entry.cost_tokens
        self._num_waiting += sign
        self.num_bytes += sign * entry.num_bytes

    @property
    def _earliest(self) -> float:
        """Where a tenant begins that was away: it cannot have missed more than there was since somebody waits."""
        return max(0.0, self._virtual_now - self._catch_up_tokens)

    def _flow_of(self, entry: Waiting) -> _Flow:
        flow = self._flows.get(entry.tenant_id)
        if flow is None:
            flow = self._flows[entry.tenant_id] = _Flow(self._earliest)
        elif not flow.num_waiting:
            flow.virtual_start = max(flow.virtual_start, self._earliest)
        flow.weight = entry.weight
        return flow

    def _serve(self, flow: _Flow, entry: Waiting) -> None:
        begin = flow.virtual_start
        flow.virtual_start += entry.cost_tokens / flow.weight
        self._virtual_now = max(self._virtual_now, begin)
        if len(self._flows) > self._flows_max:
            self._forget_the_idle()

    def _forget_the_idle(self) -> None:
        """A tenant without anybody in line is remembered only while it is less behind than anybody may be."""
        self._flows = {tenant_id: flow for tenant_id, flow in self._flows.items()
                       if flow.num_waiting or flow.virtual_start > self._earliest}
        self._flows_max = max(FLOWS_LOOK_AT, 2 * len(self._flows))

    @staticmethod
    def _first_cost(flow: _Flow) -> int:
        return next((entry.cost_tokens for _, _, entry in flow.waiting()), 0)


class ServiceRate:
    """Tokens a second that leave the queue while somebody waits: a mean over about `memory_s`."""

    def __init__(self, *, memory_s: float = 30.0) -> None:
        self._memory_s = memory_s
        self._tokens = self._seconds = 0.0
        self._since: float | None = None

    def left(self, num_tokens: int, now: float, *, queue_is_empty: bool) -> None:
        """A request of so many tokens left the line for a worker."""
        if self._since is not None and now > self._since:
            kept = math.exp(-(now - self._since) / self._memory_s)
            self._tokens = self._tokens * kept + num_tokens
            self._seconds = self._seconds * kept + now - self._since
        elif self._since is not None:
            self._tokens += num_tokens
        # Without anybody waiting the pace is that of the clients, not of the workers.
        self._since = None if queue_is_empty else now

    def began(self, now: float) -> None:
        """Somebody waits from now on."""
        if self._since is None:
            self._since = now

    def seconds_for(self, num_tokens: float) -> float | None:
        """How long so many tokens take; None while nothing is known."""
        return None if not self._tokens or not self._seconds else num_tokens * self._seconds / self._tokens
