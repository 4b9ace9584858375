"""The gateway process: its parts put together, its listeners, and its end.

Owns: start-up order, signals and the drain (contract section 3). Must never: handle a request itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import ssl
import sys
from functools import partial

import structlog
import uvloop
from aiohttp import web

from gateway.admission.keys_file import KeysError
from gateway.config import GatewayConfig
from gateway.knowledge.discovery.static import DiscoveryError, static_workers
from gateway.knowledge.endpoint_table import EndpointTable
from gateway.knowledge.worker_poll import WorkerPoll
from gateway.listening import BACKLOG, ListenError, open_listeners, port_of
from gateway.relay.connection_pool import PooledUpstream
from gateway.routing.policies import Policy, policy_named
from gateway.server.access import Access
from gateway.server.admin_token import AdminToken
from gateway.server.ahead import Ahead
from gateway.server.arrival import Arrivals
from gateway.server.attendance import Attendance, SharedAttendance, beat_for_ever
from gateway.server.connections import ConnectionLimits, GuardedServer
from gateway.server.dispatch import BetTtl, Dispatcher
from gateway.server.doorkeeper import Door, Doorkeeper, no_probe
from gateway.server.express_connection import ExpressServer
from gateway.server.generate import Generate
from gateway.server.generate_route import EXPRESS_ROUTES
from gateway.server.handlers import ClientRoutes
from gateway.server.heaps import share_heaps
from gateway.server.http import Routes
from gateway.server.metrics import measure_loop_lag
from gateway.server.openapi import OpenApiRoute
from gateway.server.ops import OpsRoutes
from gateway.server.prewarm import Prewarmer
from gateway.server.probes import Probes, Readiness
from gateway.server.prompt_work import PromptWork
from gateway.server.state import new_state
from gateway.server.tls import ServerTls, TlsError
from gateway.server.together import Together
from gateway.server.worker_admin import WorkerAdmin, Workforce
from gateway.shared.membership import Membership
from gateway.shared.segment import RowState
from worker.protocol.addresses import is_loopback
from worker.protocol.collector import collect_seldom
from worker.protocol.logs import configure_logging, get_logger

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
IDLE_POLL_S = 0.05
RETIRE_LINGER_S = 1.0
ECHO_S = 0.3
STOP_GRACE_S = 2.0
_log = get_logger(__name__)


class StartError(Exception):
    """The gateway cannot start. The message is one line with a remedy."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Gateway:
    """One gateway process's parts. Create it inside a running loop; start(), then drain() or aclose().

    `membership`: it is one of several processes on the same port.
    """

    def __init__(self, config: GatewayConfig, membership: Membership | None = None) -> None:
        table, policy, access = _checked(config)
        self._tls = _tls_of(config)     # before anything that would have to be closed again
        self.config = config
        self._membership = membership
        self.state = new_state(config, table, access, membership)
        # Beside clients' requests: however many of those there are, workers can be looked at.
        self._side_way = PooledUpstream(connect_timeout_s=config.connect_timeout_s)
        self._poll = WorkerPoll(table, self.state.ledger, self.state.joining, self.state.writer,
                                upstream=self._side_way, worker_token=config.worker_token,
                                health_interval_s=config.health_interval_s,
                                **({} if membership is None else {"was_drained": membership.drains.holds}))
        self._workforce = Workforce(table, self._poll, self.state.metrics)
        self._together = None if membership is None else Together(
            membership, table, admission=self.state.admission, metrics=self.state.metrics,
            request_drain=self._poll.request_drain, lift_drain=self._poll.lift_drain,
            take_in=self._workforce.take_in)
        self._attendance = Attendance() if membership is None else SharedAttendance(membership.segment,
                                                                                    membership.seat.row)
        self._doorkeeper: Doorkeeper | None = None
        self._upstream = PooledUpstream(connect_timeout_s=config.connect_timeout_s)
        self._prompt_work = PromptWork()
        self._readiness = Readiness(table, sync_timeout_s=config.sync_timeout_s)
        self._probes = Probes(self._readiness, late_s=self._attendance.late_s, root_path=config.root_path,
                              metrics=self.state.metrics.render if self._together is None
                              else self._together.whole_metrics_now)
        notes = None if membership is None else membership.notes
        dispatcher = Dispatcher(table, self.state.index, self.state.ledger, policy=policy,
                                bet_ttl=BetTtl(config.speculative_ttl_s, config.approximate_ttl_s),
                                max_inflight=config.max_inflight_per_worker, breakers=self.state.breakers,
                                notes=notes)
        self._prewarmer = Prewarmer(self.state, dispatcher.learning.hot, self._side_way, notes)
        self._ahead = Ahead(table, self.state.ledger, dispatcher.learning.hot, self._prewarmer,
                            membership=membership)
        self._generate = Generate(self.state, dispatcher=dispatcher, prompt_work=self._prompt_work,
                                  upstream=self._upstream, suspect=self._poll.nudge)
        self._admin_token = AdminToken(config)
        self._runners: list[web.ServerRunner] = []
        self._sites: list[web.SockSite] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._slot = 0 if membership is None else membership.seat.slot
        self.port = config.port

    async def start(self) -> None:
        """Open the listeners and begin to look at the workers. StartError when a port or file cannot be used."""
        listeners = self._listeners()
        self.port = port_of(listeners[0][self._slot])
        if self._membership is None:
            self._write_admin_token()
        self._tasks = [asyncio.create_task(beat_for_ever(self._attendance), name="beat"),
                       asyncio.create_task(self.state.writer.run(), name="index-writer"),
                       asyncio.create_task(self.state.access.watch(), name="keys"),
                       asyncio.create_task(measure_loop_lag(self.state.metrics.loop_lag), name="loop-lag")]
        if self.config.copies_ahead and self.config.policy == "headstart" and self.config.worker_token:
            self._tasks.append(asyncio.create_task(self._ahead.run(), name="copies-ahead"))
        self._poll.start()
        if self._together is not None:
            self._together.start()
            self._tasks.append(asyncio.create_task(self._together.watch_drains(), name="drains"))
        if self._membership is None or self._membership.seat.accepts_at_once:
            await self._accept(listeners)
        else:
            self._tasks.append(asyncio.create_task(self._accept_when_ready(listeners), name="accept"))
        if not self.config.workers:
            _log.warning("no_workers", reason="no worker is configured, so every request will be answered 503",
                         remedy="pass --worker http://HOST:PORT, once for each, or use `headstart up`")
        _log.info("gateway_started", host=self.config.host, port=self.port, ops_port=self.config.ops_port,
                  policy=self.config.policy, workers=[endpoint.worker.url for endpoint in self.state.table])

    async def drain(self, hurry: asyncio.Event, *, delay_s: float) -> None:
        """Stop being ready, keep accepting for `delay_s`, then finish what runs. `hurry` cuts every wait short."""
        self._readiness.closing = self._is_closing = True
        _log.info("gateway_draining", inflight=self._generate.num_inflight, drain_s=self.config.drain_s)
        await _wait_or_hurry(hurry, delay_s)
        await self._finish(hurry)

    async def retire(self, hurry: asyncio.Event) -> None:
        """Leave the port to the process that has replaced this one, and finish what runs."""
        self._is_closing = True
        _log.info("process_retiring", inflight=self._generate.num_inflight, drain_s=self.config.drain_s)
        await self._stop_accepting()
        # Clients of kept connections are told to close them by their next answer, rather than cut while they ask.
        await _wait_or_hurry(hurry, RETIRE_LINGER_S)
        if self._generate.num_inflight:
            await self._finish(hurry)
            # Streams that began before had promised to stay.
            await _wait_or_hurry(hurry, RETIRE_LINGER_S)
        await self._finish(hurry)

    async def _finish(self, hurry: asyncio.Event) -> None:
        await self._stop_accepting()
        deadline = asyncio.get_running_loop().time() + self.config.drain_s
        while self._generate.num_inflight and asyncio.get_running_loop().time() < deadline and not hurry.is_set():
            await _wait_or_hurry(hurry, IDLE_POLL_S)

    async def aclose(self) -> None:
        """Cut what is left and let everything go."""
        await self._stop_accepting()
        self._admin_token.remove()
        self._generate.cut_short()
        for runner in self._runners:
            await runner.cleanup()
        self._generate.close()
        await self._poll.aclose()
        if self._together is not None:
            await self._together.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._upstream.close()
        await self._side_way.close()
        self._prompt_work.close()

    def _routes(self) -> tuple[Routes, Routes]:
        config, together = self.config, self._together
        main, ops_only = (Routes(root_path=config.root_path, cors_origins=config.cors_origins) for _ in range(2))
        main.is_closing = ops_only.is_closing = lambda: self._is_closing
        ClientRoutes(table=self.state.table, access=self.state.access, generate=self._generate,
                     prompt_work=self._prompt_work, max_body_bytes=config.max_body_bytes).add_to(main)
        ops = OpsRoutes(self.state, self._generate, probes=self._probes, admin_token=self._admin_token.value,
                        request_drain=self._poll.request_drain if together is None else together.drain,
                        lift_drain=self._poll.lift_drain if together is None else together.lift_drain,
                        prewarmer=self._prewarmer, whole_metrics=None if together is None else together.whole_metrics)
        ops.add_probes(main)
        ops.add_probes(ops_only)
        ops.add_admin(main if config.ops_port is None else ops_only)
        WorkerAdmin(config, self.state.table, authorise=ops.authorise,
                    change=self._workforce.change if together is None else together.change).add_to(
                        main if config.ops_port is None else ops_only)
        for routes, shows_metrics in zip((main, ops_only), self._show_metrics(), strict=True):
            if shows_metrics:
                ops.add_metrics(routes)
        for routes in (main, ops_only):
            OpenApiRoute(has_tenants=self.state.access.has_tenants, root_path=config.root_path).add_to(routes)
        return main, ops_only

    def _show_metrics(self) -> tuple[bool, bool]:
        """Whether the main listener shows them, and the operators' one."""
        has_ops = self.config.ops_port is not None
        return not has_ops and is_loopback(self.config.host), has_ops

    def _write_admin_token(self) -> None:
        try:
            path = self._admin_token.write(self.port)
        except OSError as error:
            _log.warning("admin_routes_closed", reason=f"the token file cannot be written: {error}",
                         remedy="set HEADSTART_ADMIN_TOKEN or admin_token_file")
            return
        if path is not None:
            _log.info("admin_token_written", file=str(path))

    def _listeners(self) -> list[list[list[socket.socket]]]:
        """The sockets of the main listener and, where there is one, of the operators' one; by slot."""
        membership = self._membership
        if membership is not None:
            return [group for group in (membership.listeners, membership.ops_listeners) if group]
        try:
            return [open_listeners(self.config.host, port) for port in (self.config.port, self.config.ops_port)
                    if port is not None]
        except ListenError as error:
            raise StartError(str(error), EXIT_USAGE) from error

    async def _accept_when_ready(self, listeners: list[list[list[socket.socket]]]) -> None:
        """Clients have other processes meanwhile; these wait no longer than a first start would make them wait."""
        for _ in range(math.ceil(self.config.sync_timeout_s / IDLE_POLL_S)):
            if self._readiness.problem() is None:
                break
            await asyncio.sleep(IDLE_POLL_S)
        await self._accept(listeners)

    async def _accept(self, listeners: list[list[list[socket.socket]]]) -> None:
        doors = []
        contexts = (None if self._tls is None else self._tls.context, None)  # scrapers come plain
        for routes, by_slot, with_metrics, tls in zip(self._routes(), listeners, self._show_metrics(), contexts,
                                                      strict=False):
            server = await self._listen(routes, by_slot[self._slot], tls)
            probes = partial(self._probes.answer, with_metrics=with_metrics) if tls is None else no_probe
            doors += [Door(slot, each, server, probes, tls) for slot, sockets in enumerate(by_slot)
                      for each in sockets]
        self._attendance.beat()
        if self._membership is not None:
            self._membership.now(RowState.SERVING)
        self._doorkeeper = Doorkeeper(doors, self._attendance)
        self._doorkeeper.start()

    @property
    def reads_again(self) -> bool:
        """Whether there is something that SIGHUP would read."""
        return self._tls is not None or self.config.keys_file is not None

    def reload(self) -> None:
        """SIGHUP: read keys and certificate again."""
        self.state.access.reload()
        if self._tls is not None:
            self._tls.reload()

    async def _listen(self, routes: Routes, sockets: list[socket.socket],
                      context: ssl.SSLContext | None) -> GuardedServer:
        limits = ConnectionLimits(self.config.max_connections, self.config.head_timeout_s,
                                  self.config.chunk_gap_timeout_s)
        arrivals = Arrivals(self.state.access, routes, EXPRESS_ROUTES, max_body_bytes=self.config.max_body_bytes)
        server = ExpressServer(routes, self._generate.express, arrivals, limits=limits,
                               on_refused=self.state.metrics.reject)
        runner = web.ServerRunner(server, shutdown_timeout=STOP_GRACE_S)
        await runner.setup()
        self._runners.append(runner)
        for each in sockets:
            site = web.SockSite(runner, each, backlog=BACKLOG, ssl_context=context)
            await site.start()
            self._sites.append(site)
        return server

    async def _stop_accepting(self) -> None:
        if self._doorkeeper is not None:
            keeper, self._doorkeeper = self._doorkeeper, None
            await asyncio.to_thread(keeper.stop)
        while self._sites:
            await self._sites.pop().stop()
        if self._together is not None:
            self._together.leaving()


def run(config: GatewayConfig, membership: Membership | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status (0 drained, 2 bad configuration or a port in use)."""
    share_heaps()
    configure_logging(config.log_format, config.log_level)
    if membership is not None:
        structlog.contextvars.bind_contextvars(process=membership.seat.slot)
    try:
        return uvloop.run(_serve(config, membership))
    except StartError as error:
        print(f"headstart gateway: {error}", file=sys.stderr)
        return error.exit_code


async def _serve(config: GatewayConfig, membership: Membership | None) -> int:
    gateway, signals = Gateway(config, membership), _Signals()
    try:
        await gateway.start()
        collect_seldom()
        if gateway.reads_again or membership is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.reload)
        await signals.first.wait()
        if signals.replaced:
            await gateway.retire(signals.second)
            return EXIT_OK
        # The delay is for load balancers to notice; a person at the terminal has noticed already.
        await gateway.drain(signals.second, delay_s=0.0 if signals.interrupted else config.drain_delay_s)
    finally:
        await gateway.aclose()
    return EXIT_OK


class _Signals:
    """The first SIGTERM or SIGINT drains; the second means now. SIGUSR1: another process has taken over."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.interrupted = self.replaced = False
        self._first_number, self._first_at = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.first.is_set():
            # The kernel tells of a dead supervisor once for each of its threads.
            is_echo = number == self._first_number and now - self._first_at < ECHO_S
            if number != signal.SIGUSR1 and not is_echo:
                self.second.set()
            return
        self._first_number, self._first_at = number, now
        self.replaced = number == signal.SIGUSR1
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.first.set()


async def _wait_or_hurry(hurry: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await hurry.wait()


def _checked(config: GatewayConfig) -> tuple[EndpointTable, Policy, Access]:
    try:
        return EndpointTable(static_workers(config.workers)), policy_named(config.policy), Access(config)
    except (DiscoveryError, KeysError, ValueError) as error:
        raise StartError(str(error), EXIT_USAGE) from error


def _tls_of(config: GatewayConfig) -> ServerTls | None:
    try:
        return ServerTls.of(config)
    except TlsError as error:
        raise StartError(str(error), EXIT_USAGE) from error
