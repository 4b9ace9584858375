"""Health, load and lives of the workers: one watcher per worker looks, one keeper writes the endpoint table.

Owns: the poll's pace, the endpoint table's contents, and which event feed follows which life of a worker.
Must never: route, or take a worker for dead because one answer was late (an unreachable one is another matter).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.knowledge.discovery.static import DiscoveredWorker
from gateway.knowledge.endpoint_table import Endpoint, EndpointState, EndpointTable
from gateway.knowledge.engines.headstart import (
    HeadstartWorker,
    WorkerLate,
    WorkerNotReady,
    WorkerNotUnderstood,
    WorkerReport,
    WorkerUnreachable,
)
from gateway.knowledge.event_feed import QUIET_CHECK_S, EventFeed
from gateway.knowledge.index_writer import IndexWriter
from gateway.knowledge.joining import Joined, Joining
from gateway.relay.upstream import Upstream
from gateway.routing.load_ledger import LoadLedger
from gateway.routing.lost_looks import look_at_lost_after_s
from gateway.routing.others_share import look_again_after_s
from worker.protocol.block_hash import HashScheme
from worker.protocol.logs import get_logger

LATE_ANSWERS_TOLERATED = 2
LATE_AFTER_S = 1.5
MAX_QUEUED_OBSERVATIONS = 1024
# A look at a silent feed costs about 0.3 ms; beyond some 20 of them, all together take a fiftieth of a core.
QUIET_CHECK_COST_S = 0.015
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look at a worker found. `report` None: it is not to be used, and `detail` says why."""

    endpoint_id: str
    report: WorkerReport | None
    detail: str = ""
    joined: Joined | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants no more new work sent there, for this life of the worker."""

    endpoint_id: str
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class DrainLifted:
    """An operator wants work sent there again."""

    endpoint_id: str
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class RemovalRequested:
    """An operator wants a worker forgotten. What runs there may end."""

    endpoint_id: str
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class LifeEnded:
    """The worker says that it is in another life, `epoch`, than the one we know; it has not joined in that yet."""

    endpoint_id: str
    epoch: str


_Note = Observation | DrainRequested | DrainLifted | LifeEnded | RemovalRequested


class WorkerPoll:
    """Starts the watchers and the keeper; `aclose()` stops them. Needs a running loop.

    `was_drained` knows which lives of workers an operator drained through another process of this gateway.
    """

    def __init__(self, table: EndpointTable, ledger: LoadLedger, joining: Joining, writer: IndexWriter, *,
                 upstream: Upstream, worker_token: str, health_interval_s: float,
                 was_drained: Callable[[str, str], bool] = lambda endpoint_id, epoch: False) -> None:
        self._table = table
        self._ledger = ledger
        self._joining = joining
        self._writer = writer
        self._interval_s = health_interval_s
        self._upstream = upstream
        self._worker_token = worker_token
        self._has_token = bool(worker_token)
        self._was_drained = was_drained
        self._adapters = {endpoint.endpoint_id: HeadstartWorker(upstream, endpoint.worker, worker_token)
                          for endpoint in table}
        self._nudges = {endpoint_id: asyncio.Event() for endpoint_id in self._adapters}
        self._inbox: asyncio.Queue[_Note] = asyncio.Queue(MAX_QUEUED_OBSERVATIONS)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look."""
        self._tasks.append(asyncio.create_task(self._keep(), name="endpoint-keeper"))
        for adapter in self._adapters.values():
            self._begin_watch(adapter)

    def _begin_watch(self, adapter: HeadstartWorker) -> None:
        endpoint_id = adapter.worker.endpoint_id
        self._watches[endpoint_id] = asyncio.create_task(self._watch(adapter), name=f"watch-{endpoint_id}")

    async def add(self, worker: DiscoveredWorker) -> None:
        """One more worker, whose id is free; it gets requests once it has been understood."""
        adapter = HeadstartWorker(self._upstream, worker, self._worker_token)
        self._table.add(worker)
        self._adapters[worker.endpoint_id] = adapter
        self._nudges[worker.endpoint_id] = asyncio.Event()
        self._begin_watch(adapter)

    async def remove(self, endpoint_id: str) -> None:
        """See RemovalRequested. Returns once nothing is known of it any more."""
        request = RemovalRequested(endpoint_id)
        await self._inbox.put(request)
        await request.done.wait()

    async def _forget(self, endpoint_id: str) -> None:
        tasks = [task for held in (self._watches, self._feeds) if (task := held.pop(endpoint_id, None)) is not None]
        await _cancel_all(tasks)
        self._nudges.pop(endpoint_id, None)
        self._adapters.pop(endpoint_id, None)
        self._joining.forget(endpoint_id)
        self._table.remove(endpoint_id)
        await self._writer.forget(endpoint_id)

    def nudge(self, endpoint_id: str) -> None:
        """Look at this worker now rather than at the next interval: a request has just failed there."""
        if endpoint_id in self._nudges:
            self._nudges[endpoint_id].set()

    async def request_drain(self, endpoint_id: str) -> None:
        """See DrainRequested. Returns once no request of this process goes there any more."""
        request = DrainRequested(endpoint_id)
        await self._inbox.put(request)
        await request.done.wait()

    async def lift_drain(self, endpoint_id: str) -> None:
        """See DrainLifted. Returns once requests of this process may go there, if nothing else is against it."""
        request = DrainLifted(endpoint_id)
        await self._inbox.put(request)
        await request.done.wait()

    async def aclose(self) -> None:
        """Stop everything and close the event sockets."""
        await _cancel_all([*self._tasks, *self._watches.values(), *self._feeds.values()])

    async def _watch(self, adapter: HeadstartWorker) -> None:
        failures = 0
        nudge = self._nudges[adapter.worker.endpoint_id]
        while True:
            nudge.clear()
            try:
                seen = await self._look(adapter)
            except WorkerLate as late:
                failures += 1
                if failures > LATE_ANSWERS_TOLERATED:
                    await self._inbox.put(Observation(adapter.worker.endpoint_id, None, str(late)))
            else:
                failures = failures + 1 if seen.report is None else 0
                await self._inbox.put(seen)
            pause_s = self._pause_s(adapter.worker.endpoint_id, failures)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await nudge.wait()

    def _pause_s(self, endpoint_id: str, num_failures: int) -> float:
        endpoint = self._table.get(endpoint_id)
        if num_failures > LATE_ANSWERS_TOLERATED:
            return look_at_lost_after_s(self._interval_s, num_failures, len(self._adapters))
        if num_failures or endpoint is None:
            return self._interval_s
        others_ratio = max(endpoint.others.ratio, self._table.unseen.ratio)
        return look_again_after_s(self._interval_s, others_ratio, len(self._adapters))

    async def _look(self, adapter: HeadstartWorker) -> Observation:
        endpoint_id = adapter.worker.endpoint_id
        endpoint = self._table.get(endpoint_id)
        assert endpoint is not None, "a watcher outlived its endpoint"
        try:
            report = await adapter.report(max(self._interval_s, LATE_AFTER_S))
            if endpoint.joined_epoch not in (None, report.epoch):
                await self._inbox.put(LifeEnded(endpoint_id, report.epoch))  # joining may take a while
            must_join = report.epoch != endpoint.joined_epoch or self._joining.must_judge_again(
                endpoint, asyncio.get_running_loop().time())
            joined = await self._joining.join(adapter, report) if must_join else None
        except WorkerLate:
            raise
        except (WorkerUnreachable, WorkerNotReady, WorkerNotUnderstood) as why:
            return Observation(endpoint_id, None, str(why))
        except Exception as error:
            _log.exception("worker_poll_failed", worker=endpoint_id)
            return Observation(endpoint_id, None, f"the poll failed: {error!r}")
        return Observation(endpoint_id, report, joined=joined)

    async def _keep(self) -> None:
        while True:
            note = await self._inbox.get()
            endpoint = self._table.get(note.endpoint_id)
            if isinstance(note, DrainRequested | DrainLifted):
                note.done.set()  # by the time its asker runs, so it is: nothing is awaited on the way
            if isinstance(note, RemovalRequested):
                await self._forget(note.endpoint_id)
                note.done.set()
                continue
            if endpoint is None:
                continue
            before = endpoint.state, endpoint.detail
            if isinstance(note, DrainRequested | DrainLifted):
                endpoint.drain_requested = isinstance(note, DrainRequested)
            elif isinstance(note, LifeEnded):
                await self._end_life(endpoint, note)
            else:
                await self._record(endpoint, note)
            if (endpoint.state, endpoint.detail) != before:
                _log_state(endpoint)

    async def _record(self, endpoint: Endpoint, seen: Observation) -> None:
        endpoint.reachable = seen.report is not None
        if seen.report is None:
            endpoint.detail = seen.detail
            self._joining.left(endpoint.endpoint_id)
            return
        own, load = self._ledger.load(endpoint.endpoint_id), seen.report.load
        reported, now = load.running + load.waiting, asyncio.get_running_loop().time()
        endpoint.others.saw(own.num_inflight, reported, now)
        self._table.unseen.saw(own.num_inflight, reported, now, next_after_s=self._pause_s(endpoint.endpoint_id, 0))
        endpoint.report, endpoint.own_load_at_report = seen.report, own
        self._table.fade_rates(endpoint, time.monotonic())
        if seen.joined is not None:
            await self._begin_life(endpoint, seen.joined)
        elif endpoint.compatible:
            endpoint.detail = ""
        if endpoint.state in (EndpointState.READY, EndpointState.DRAINING):
            endpoint.detail = _token_problem(seen.report, has_token=self._has_token) or endpoint.detail

    async def _begin_life(self, endpoint: Endpoint, joined: Joined) -> None:
        """Forget the worker's former life, or this one's former verdict, then follow it."""
        await self._stop_following(endpoint.endpoint_id)
        is_drained = endpoint.drain_requested and endpoint.joined_epoch == joined.epoch
        if endpoint.joined_epoch != joined.epoch:
            self._table.forget_rates(endpoint)
        endpoint.joined_epoch = joined.epoch
        endpoint.scheme = self._table.same_scheme(joined.scheme)
        endpoint.compatible = joined.compatible
        endpoint.parity = joined.parity
        endpoint.detail = joined.detail
        endpoint.drain_requested = is_drained or self._was_drained(endpoint.endpoint_id, joined.epoch)
        self._ledger.begin(endpoint.endpoint_id, joined.epoch)
        if joined.scheme is not None and joined.compatible:
            self._follow(endpoint, joined.scheme)

    async def _end_life(self, endpoint: Endpoint, ended: LifeEnded) -> None:
        if endpoint.joined_epoch == ended.epoch:
            return  # it has joined meanwhile
        endpoint.joined_epoch = None
        endpoint.detail = "it began another life and has not joined yet"
        await self._stop_following(endpoint.endpoint_id)

    async def _stop_following(self, endpoint_id: str) -> None:
        if feed := self._feeds.pop(endpoint_id, None):
            await _cancel_all([feed])
        await self._writer.forget(endpoint_id)

    def _follow(self, endpoint: Endpoint, scheme: HashScheme) -> None:
        assert endpoint.report is not None
        sockets = endpoint.report.events
        if sockets is None:
            return
        feed = EventFeed(self._adapters[endpoint.endpoint_id], sockets, scheme=scheme, writer=self._writer,
                         status=endpoint.feed,
                         quiet_check_s=max(QUIET_CHECK_S, QUIET_CHECK_COST_S * len(self._adapters)))
        self._feeds[endpoint.endpoint_id] = asyncio.create_task(feed.run(),
                                                                name=f"feed-{endpoint.endpoint_id}")


def _token_problem(report: WorkerReport, *, has_token: bool) -> str:
    """What is wrong between its HEADSTART_WORKER_TOKEN and ours, with the remedy; "" when nothing is."""
    remedy = "give gateway and worker the same HEADSTART_WORKER_TOKEN"
    if report.internal_requests == "refused":
        what = "its worker token is not the gateway's" if has_token else "it has a worker token and the gateway none"
        return f"{what}, so the contents of its cache stay unknown and it tokenises by itself: {remedy}"
    if report.internal_requests == "off" and has_token:
        return f"the gateway has a worker token and it has none, so it tokenises by itself: {remedy}"
    return ""


def _log_state(endpoint: Endpoint) -> None:
    facts = {"worker": endpoint.endpoint_id, "url": endpoint.worker.url, "state": endpoint.state.value,
             "epoch": endpoint.epoch, "model": endpoint.model}
    if endpoint.detail and endpoint.state is EndpointState.READY:
        _log.warning("worker_ready", **facts, reason=endpoint.detail)
    elif endpoint.state in (EndpointState.READY, EndpointState.DRAINING):
        _log.info("worker_" + endpoint.state.value, **facts)
    else:
        _log.warning("worker_" + endpoint.state.value, **facts, reason=endpoint.detail)


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
