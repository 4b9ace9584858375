"""The worker's HTTP process from start to exit code.

Owns the order of things: sockets first (a port in use is told at once, before any weights are read), then the engine
in its own process, then signals until one of them, or the engine's end, decides how to stop. Imports no torch: this
process answers /livez while the model loads.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop
from aiohttp import web

from worker.config import WorkerConfig
from worker.engine.engine_client import EngineClient
from worker.engine.engine_config import EngineConfig
from worker.prompt.messages_body import COUNT_TOKENS
from worker.protocol.addresses import is_loopback
from worker.protocol.http_mistakes import PrivateAppRunner
from worker.protocol.logs import configure_logging, get_logger
from worker.server import handlers, kv_routes, model_routes, ops_routes, prewarm_route
from worker.server.cpu_share import usable_cores
from worker.server.error_middleware import error_middleware
from worker.server.events_publisher import EventsPublisher, PortTakenError
from worker.server.intake import FOREIGN
from worker.server.shell import SHELL, Shell

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
LISTEN_BACKLOG = 1024
LAST_BYTES_S = 2.0          # for handlers to write their last event once everything has ended
ENGINE_CLOSE_S = 5.0
_log = get_logger("worker.server.app")


class UsageError(Exception):
    """A user's mistake: one line that names it and the remedy."""


def run(config: WorkerConfig) -> int:
    """Serve until told to stop. Returns the exit code: 0 stopped, 1 the engine failed, 2 a user's mistake."""
    configure_logging(config.log_format, config.log_level)
    try:
        settings = engine_config(config)
        warn_of_threads(settings.threads)
        return uvloop.run(_serve(config, settings))
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_OK      # Ctrl-C before the loop could take it


def warn_of_threads(threads: int) -> None:
    """A line in the log where the engine has more threads than cores to run them on."""
    cores = len(usable_cores())
    if threads > cores:
        _log.warning("more_threads_than_cores", threads=threads, cores=cores, reason="threads of one step that share "
                     "a core wait for each other", remedy="give --threads auto, or no more than there are cores")


def build_app(shell: Shell) -> web.Application:
    """All routes of contract section 4, behind the one place that renders errors."""
    app = web.Application(middlewares=[error_middleware], client_max_size=shell.config.max_body_bytes)
    app[SHELL] = shell
    app.router.add_post("/v1/chat/completions", handlers.chat_completions)
    app.router.add_post("/v1/completions", handlers.completions)
    app.router.add_post("/v1/embeddings", handlers.embeddings)
    for path in FOREIGN:
        app.router.add_post(path, handlers.foreign)
    app.router.add_post(COUNT_TOKENS.path, model_routes.count_tokens)
    app.router.add_get("/v1/models", model_routes.list_models)
    app.router.add_get("/v1/models/{model:.+}", model_routes.get_model)
    app.router.add_post("/tokenize", model_routes.tokenize)
    app.router.add_post("/detokenize", model_routes.detokenize)
    app.router.add_get("/tokenizer", model_routes.tokenizer)
    app.router.add_get("/kv", kv_routes.kv_state)
    app.router.add_get("/kv/snapshot", kv_routes.kv_snapshot)
    app.router.add_post("/kv/reset", kv_routes.kv_reset)
    app.router.add_post(prewarm_route.ROUTE, prewarm_route.prewarm)
    app.router.add_post("/abort", kv_routes.abort)
    app.router.add_get("/livez", ops_routes.livez)
    app.router.add_get("/readyz", ops_routes.readyz)
    app.router.add_get("/health", ops_routes.health)
    app.router.add_get("/metrics", ops_routes.metrics)
    return app


def engine_config(config: WorkerConfig) -> EngineConfig:
    """The engine's part of the worker's settings. UsageError names the setting that cannot be read."""
    try:
        threads = 0 if config.threads == "auto" else int(config.threads)
    except ValueError:
        raise UsageError(f"threads is {config.threads!r}; give a number or \"auto\".") from None
    try:
        hash_seed = bytes.fromhex(config.hash_seed)
    except ValueError:
        raise UsageError("hash_seed is not hex; give an even number of hex digits (HEADSTART_HASH_SEED).") from None
    return EngineConfig(
        model=config.model, served_name=config.served_name, block_size=config.block_size, kv_memory=config.kv_memory,
        kv_dtype=config.kv_dtype, exactness=config.exactness, kv_cache=config.kv_cache, threads=threads,
        device=config.device, hash_seed=hash_seed, chat_template=config.chat_template,
        max_batch_tokens=config.max_batch_tokens, max_running=config.max_running, max_waiting=config.max_waiting,
        max_context=config.max_context, target_itl_ms=config.target_itl_ms, batching=config.batching,
        cache_dir=config.cache_dir, lora=config.loras, weight_dtype=config.weight_dtype,
        log_format=config.log_format, log_level=config.log_level)


async def _serve(config: WorkerConfig, engine_settings: EngineConfig) -> int:
    stop = _StopSignals()
    publisher = _bind_events(config)
    engine = EngineClient()
    shell = Shell(config, engine, publisher)
    runner = PrivateAppRunner(build_app(shell), handler_cancellation=True, access_log=None,
                              shutdown_timeout=LAST_BYTES_S)
    try:
        shell.port = await _listen(runner, config)
        await engine.start(engine_settings, shell.on_report)
        return await _until_stopped(shell, stop)
    finally:
        await runner.cleanup()
        await engine.close(ENGINE_CLOSE_S)
        await publisher.close()


async def _until_stopped(shell: Shell, stop: _StopSignals) -> int:
    """Wait for the first of: the engine's end, SIGTERM (be seen to leave, then finish what runs), SIGINT (now)."""
    await _first_of(shell.failed, stop.drain, stop.now)
    if stop.drain.is_set() and shell.leave():
        _log.info("leaving", delay_s=shell.config.drain_delay_s)
        await _first_of(shell.failed, stop.now, timeout_s=shell.config.drain_delay_s)
    if shell.failure is None:
        shell.drain()
        _log.info("draining", requests=len(shell.requests), limit_s=shell.config.drain_s)
        await _first_of(shell.idle, shell.failed, stop.now, timeout_s=shell.config.drain_s)
    if shell.failure is not None:
        return _complain(shell.failure.message, EXIT_USAGE if shell.failure.users_fault else EXIT_FAILED)
    shell.cut_short()
    return EXIT_OK


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


class _StopSignals:
    """SIGTERM asks to drain, SIGINT to stop now; a second signal of either kind means now."""

    def __init__(self) -> None:
        self.drain, self.now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self.now.set)

    def _on_term(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()


def _bind_events(config: WorkerConfig) -> EventsPublisher:
    try:
        return EventsPublisher(config.events_host, config.events_port)
    except PortTakenError as error:
        raise UsageError(str(error)) from None


async def _listen(runner: web.AppRunner, config: WorkerConfig) -> int:
    """Bind, and return the port. UsageError when it is taken."""
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port, backlog=LISTEN_BACKLOG)
    try:
        await site.start()
    except OSError as error:
        raise UsageError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
                         "stop what uses it or choose another --host or --port.") from None
    port = int(runner.addresses[0][1])
    _log.info("listening", host=config.host, port=port)
    if not config.worker_token and not is_loopback(config.host):
        _log.warning("open_to_the_network", host=config.host, reason="without a worker token whoever reaches this "
                     "address may read what is cached (GET /kv/snapshot), reset it and abort requests",
                     remedy="set HEADSTART_WORKER_TOKEN, the same at worker and gateway")
    return port


def _complain(line: str, exit_code: int) -> int:
    print(f"headstart worker: {line}", file=sys.stderr, flush=True)
    return exit_code
