"""`headstart gateway --processes N`: N processes on one port, started, restarted, replaced and stopped together.

Owns: the listening sockets, the shared memory and who sits in which row of it, the admin token, the processes, and
the metrics of the whole. Routes nothing. A slot is a set of listening sockets (SO_REUSEPORT: the kernel spreads
clients over the slots); its process changes at a restart or reload, the sockets stay. Each slot has two rows, so that
a new process can begin while the one before it finishes.

A death is answered by a restart after a delay that doubles; until the new process is ready its neighbours accept
for it. Before the first process has ever served, a user's mistake or several deaths end the start instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from gateway.config import GatewayConfig
from gateway.listening import ListenError, open_listeners, port_of
from gateway.processes.child import Child, child_environ, start_child
from gateway.processes.member_line import Answers
from gateway.processes.metric_sum import MetricSum, Snapshot, exposition
from gateway.processes.own_metrics import own_metrics
from gateway.server.admin_token import AdminToken
from gateway.shared.fleet_edits import FleetEdits
from gateway.shared.membership import Seat
from gateway.shared.notes import note_sockets
from gateway.shared.segment import RowState, Segment, new_segment_file
from gateway.supervisor import EXIT_USAGE, START_DEATHS_MAX, STEADY_AFTER_S, backoff_s, in_words
from worker.protocol.logs import configure_logging, get_logger

EXIT_OK, EXIT_FAILED = 0, 1
POLL_S = 0.05
METRICS_EVERY_S = 1.0
READY_MARGIN_S = 30.0       # on top of sync_timeout_s, for a replacement to accept its first connection
STOP_MARGIN_S = 5.0         # on top of what draining may take
_log = get_logger(__name__)

ReadConfig = Callable[[], GatewayConfig]


def run(config: GatewayConfig, read_config: ReadConfig, argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status (0 drained, 1 cannot be kept up, 2 a user's mistake)."""
    configure_logging(config.log_format, config.log_level)
    try:
        listeners = open_listeners(config.host, config.port, num_sets=config.processes)
        ops = [] if config.ops_port is None else open_listeners(config.host, config.ops_port,
                                                                num_sets=config.processes)
    except ListenError as error:
        print(f"headstart gateway: {error}", file=sys.stderr)
        return EXIT_USAGE
    return asyncio.run(_serve(lambda: Group(config, argv, listeners, ops), read_config))


async def _serve(new_group: Callable[[], Group], read_config: ReadConfig) -> int:
    loop, group = asyncio.get_running_loop(), new_group()
    stops: asyncio.Queue[signal.Signals] = asyncio.Queue()
    reloads = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stops.put_nowait, signum)
    loop.add_signal_handler(signal.SIGHUP, reloads.set)
    try:
        starting = asyncio.create_task(group.start())
        stopping = asyncio.create_task(stops.get())
        reloading = asyncio.create_task(_reload_when_told(group, read_config, reloads, starting))
        first: list[asyncio.Future[Any]] = [stopping, group.failed]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for task in (starting, reloading):
            task.cancel()
        if not stopping.done():
            stopping.cancel()
            await group.stop(signal.SIGINT, stops)
            return group.failed.result()
        await group.stop(stopping.result(), stops)
        return EXIT_OK
    finally:
        await group.aclose()


async def _reload_when_told(group: Group, read_config: ReadConfig, told: asyncio.Event,
                            starting: asyncio.Task[None]) -> None:
    await asyncio.wait([starting])
    while True:
        await told.wait()
        told.clear()
        try:
            config = read_config()
        except SystemExit:
            _log.error("not_reloaded", reason="the configuration is wrong now; what is wrong is on standard error",
                       remedy="mend it and send SIGHUP again; the running processes keep what they had")
        else:
            await group.reload(config)


class Group:
    """All processes of one gateway. Create it in a running loop; start(), then stop(), then aclose()."""

    def __init__(self, config: GatewayConfig, argv: Sequence[str], listeners: list[list[socket.socket]],
                 ops_listeners: list[list[socket.socket]]) -> None:
        self._config = config
        self._argv = list(argv)
        self._listeners, self._ops_listeners = listeners, ops_listeners
        self._num_slots = config.processes
        self._segment_file = new_segment_file(2 * self._num_slots)
        self._segment = Segment(self._segment_file)
        self._note_sockets = [note_sockets() for _ in range(2 * self._num_slots)]
        self._admin_token = AdminToken(config)
        self._current: list[Child | None] = [None] * self._num_slots
        self._successors: list[Child | None] = [None] * self._num_slots
        self._children: set[Child] = set()
        self._watchers: set[asyncio.Task[None]] = set()
        self._deaths = [0] * self._num_slots
        self._metrics = MetricSum()
        self._fleet, self._changing = FleetEdits(), asyncio.Lock()
        self._num_restarts = {"died": 0, "reload": 0}
        self._settled = False
        self._stopping = asyncio.Event()
        self.failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """The first process shows whether the configuration is any good, then come the others."""
        self._write_admin_token()
        self._watch(self._keep_metrics())
        for slot in range(self._num_slots):
            # The others accept once they are ready: "ready" from the first must not mean "no worker" from them.
            await self._start(slot, accepts_at_once=slot == 0)
            if slot == 0:
                async for _ in _ticks(math.inf):  # ends with `failed` at the latest
                    if self._is_serving(self._current[0]):
                        break
                self._settled = True
        _log.info("processes_started", processes=self._num_slots, port=port_of(self._listeners[0]))

    async def reload(self, config: GatewayConfig) -> None:
        """Replace every process by a new one, one after the other, each only once its successor is ready."""
        if (config.host, config.port, config.ops_port, config.processes) != (
                self._config.host, self._config.port, self._config.ops_port, self._config.processes):
            _log.warning("settings_kept", reason="address, ports and number of processes change by a restart only")
        _log.info("reload_started", processes=self._num_slots)
        for slot in range(self._num_slots):
            if not await self._replace(slot, config):
                return
        _log.info("reload_finished", processes=self._num_slots)

    async def stop(self, signum: signal.Signals, again: asyncio.Queue[signal.Signals]) -> None:
        """Pass the signal on and wait; a second one is passed on too. What outlives the drain is killed."""
        self._stopping.set()
        limit_s = self._config.drain_delay_s + self._config.drain_s + STOP_MARGIN_S
        self._signal_all(signum)
        async for _ in _ticks(limit_s):
            if not self._children:
                return
            with contextlib.suppress(asyncio.QueueEmpty):
                self._signal_all(again.get_nowait())
        if self._children:
            _log.warning("processes_killed", processes=len(self._children), limit_s=limit_s)
            self._signal_all(signal.SIGKILL)

    async def aclose(self) -> None:
        """Nothing of ours is left."""
        self._stopping.set()
        self._signal_all(signal.SIGKILL)
        async for _ in _ticks(STOP_MARGIN_S):
            if not self._children:
                break
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._admin_token.remove()

    # ---- processes -----------------------------------------------------------------------------------------------

    async def _start(self, slot: int, *, accepts_at_once: bool) -> Child:
        row = await self._free_row(slot)
        self._segment.begin_row(row, slot)
        child = await start_child(lambda line: self._seat(slot, row, line, accepts_at_once=accepts_at_once),
                                  self._argv, child_environ(self._admin_token.value), Answers(
                                      lambda snapshot: self._keep(row, snapshot), self.render_metrics,
                                      self._change, self._fleet.to_bytes))
        self._children.add(child)
        self._watch(self._until_ended(child))
        if self._current[slot] is None:
            self._current[slot] = child
        return child

    async def _free_row(self, slot: int) -> int:
        """The slot's row that nobody sits in; the processes that finish are given their time."""
        async for _ in _ticks(math.inf):  # _end_by() frees one
            taken = {child.seat.row for child in self._children}
            for row in (slot, slot + self._num_slots):
                if row not in taken:
                    return row
        raise AssertionError("unreachable")

    def _seat(self, slot: int, row: int, line: int, *, accepts_at_once: bool) -> Seat:
        return Seat(slot=slot, row=row, segment=self._segment_file, line=line, accepts_at_once=accepts_at_once,
                    listeners=[[each.fileno() for each in group] for group in self._listeners],
                    ops_listeners=[[each.fileno() for each in group] for group in self._ops_listeners],
                    inboxes=[inbox.fileno() for inbox, _ in self._note_sockets],
                    outlets=[outlet.fileno() for _, outlet in self._note_sockets])

    async def _until_ended(self, child: Child) -> None:
        code = await child.process.wait()
        slot, row = child.seat.slot, child.seat.row
        self._segment.clear_row(row)
        await child.line.close()
        self._metrics.end(row)
        self._children.discard(child)
        if self._current[slot] is child:
            self._current[slot] = self._successors[slot]
        if child.leaving or self._stopping.is_set() or self._current[slot] is not None:
            return
        await self._after_death(child, code)

    async def _after_death(self, child: Child, code: int) -> None:
        slot = child.seat.slot
        self._deaths[slot] = 1 if child.lived_s > STEADY_AFTER_S else self._deaths[slot] + 1
        if not self._settled and (code == EXIT_USAGE or self._deaths[slot] >= START_DEATHS_MAX):
            if not self.failed.done():
                self.failed.set_result(EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED)
            return
        delay_s = backoff_s(self._deaths[slot])
        _log.error("process_ended", process=slot, reason=in_words(code), restart_in_s=delay_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        if not self._stopping.is_set():
            self._num_restarts["died"] += 1
            await self._start(slot, accepts_at_once=not self._settled)

    async def _replace(self, slot: int, config: GatewayConfig) -> bool:
        successor = self._successors[slot] = await self._start(slot, accepts_at_once=False)
        async for _ in _ticks(config.sync_timeout_s + READY_MARGIN_S):
            if self._is_serving(successor) or successor.process.returncode is not None:
                break
        self._successors[slot] = None
        if not self._is_serving(successor):
            successor.leaving = True
            successor.signal(signal.SIGKILL)
            _log.error("reload_stopped", process=slot, reason="the new process did not become ready",
                       remedy="see its own lines; the other processes go on as they were")
            return False
        before, self._current[slot] = self._current[slot], successor
        self._num_restarts["reload"] += 1
        if before is not None and before is not successor:
            before.leaving = True
            before.signal(signal.SIGUSR1)
            self._watch(self._end_by(before, config.drain_s + STOP_MARGIN_S))
        return True

    async def _end_by(self, child: Child, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.process.wait(), limit_s)
        child.signal(signal.SIGKILL)

    def _is_serving(self, child: Child | None) -> bool:
        return child is not None and child.process.returncode is None and (
            self._segment.state(child.seat.row) is RowState.SERVING)

    def _signal_all(self, signum: signal.Signals) -> None:
        for child in self._children:
            child.signal(signum)

    def _watch(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    # ---- for all of them -----------------------------------------------------------------------------------------

    async def render_metrics(self) -> bytes:
        """The whole gateway's metrics as of now."""
        await self._ask_all()
        living = len(self._segment.living())
        return exposition([*self._metrics.families(), *own_metrics(living, self._num_restarts)])

    async def _keep_metrics(self) -> None:
        """What a process has counted must outlive it, so it is asked from time to time."""
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            await self._ask_all()

    async def _ask_all(self) -> None:
        await asyncio.gather(*(child.line.ask() for child in self._children))

    async def _change(self, edit: bytes) -> bytes:
        """A process asks for a change of the workers; every one has taken it in when this returns."""
        async with self._changing:
            if problem := self._fleet.take(edit):
                return problem
            has_heard = await asyncio.gather(*(child.line.tell_fleet() for child in self._children))
        if not all(has_heard):
            _log.warning("fleet_change_unseen", processes=has_heard.count(False), reason="they have not taken in a "
                         "change of the workers yet; they will as soon as their event loops turn")
        return b""

    def _keep(self, row: int, snapshot: Snapshot) -> None:
        self._metrics.put(row, snapshot)

    def _write_admin_token(self) -> None:
        try:
            path = self._admin_token.write(port_of(self._listeners[0]))
        except OSError as error:
            _log.warning("admin_routes_closed", reason=f"the token file cannot be written: {error}",
                         remedy="set HEADSTART_ADMIN_TOKEN or admin_token_file")
            return
        if path is not None:
            _log.info("admin_token_written", file=str(path))


async def _ticks(limit_s: float) -> AsyncIterator[None]:
    """At once and then every POLL_S, for so long."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        yield
        await asyncio.sleep(POLL_S)
