"""The HTTP shell's end of the engine: starts the process, sends commands, hands its reports to the event loop.

Owns the engine's process life and the pipe. Imports no torch, no scheduler, no model: the shell must stay light and
alive while the model loads. Two threads do the blocking work (one writes commands, one reads reports), so that
neither pickling nor a full pipe ever holds up the event loop; reports cross over once per step, never once per token.
All public methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from worker.engine.engine_config import EngineConfig
from worker.engine.exact_products import ask_for_strict_products
from worker.engine.heartbeat import LOOK_EVERY_S, SILENT_LOOKS, Heartbeat
from worker.engine.messages import (
    AbortRequest,
    Command,
    EngineBeat,
    EngineFailed,
    EngineReady,
    EngineStats,
    Report,
    ResetCache,
    Shutdown,
    StepReport,
    SubmitSequence,
)
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

COMMAND_BACKLOG_MAX = 4096   # commands written by nobody yet; aborts always pass
EXIT_WAIT_S = 5.0            # how long a process whose pipe closed may take to exit before it is killed
RETRY_AFTER_S = "1"
RETRY_AFTER_MAX_S = 60       # however long the queue is, a client asks again after a minute

_log = get_logger("worker.engine.engine_client")
OnReport = Callable[[Report], None]


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


# glibc's malloc asks for huge pages, and keeps weights and scratch on its heap, where they get them: a step reads all
# weights from memory, and with pages of 4 KiB a seventh of a decode step goes into finding them.
# What a step frees stays on the heap for the next one: given back, it would be zeroed and mapped again at every step.
MALLOC_TUNABLES = ("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:"
                   "glibc.malloc.trim_threshold=4294967296")
# How long a thread of the engine looks for work before it sleeps, in turns of libgomp's loop: about 80 us. A step
# hands out work 150 times, some tens of microseconds apart, and to wake a sleeper costs more. Between steps and while
# idle all sleep. On cores that others use too, looking costs more than it saves.
SPIN_TURNS = "5000"


class EngineClient:
    """One engine process. `start` returns once it is spawned; EngineReady or EngineFailed arrives as a report."""

    def __init__(self) -> None:
        self.state = EngineState.LOADING
        self.ready: EngineReady | None = None
        self.failure: EngineFailed | None = None
        self.stats = EngineStats()
        self._decided = asyncio.Event()
        self._open: dict[tuple[str, int], bool] = {}     # (request id, choice) -> abort already sent
        self._open_max = 0
        self._heartbeat = Heartbeat()
        self._backlog: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, config: EngineConfig, on_report: OnReport) -> None:
        """Spawn the process. `on_report` is called on this event loop, once per step, in the engine's order.

        Raises OSError when no process can be started.
        """
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._open_max = config.max_running + config.max_waiting
        ours, theirs = Pipe(duplex=True)
        self._connection: Connection = ours
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - spawning takes milliseconds, once
                [sys.executable, "-P", "-m", "worker.engine.engine_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=_environment(config), stdin=subprocess.DEVNULL,
                start_new_session=True)          # Ctrl-C and group signals reach the shell, which decides
        finally:
            theirs.close()
        self._reader = threading.Thread(target=self._read_reports, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_commands, args=(config,), name="engine-writer",
                                        daemon=True)
        self._reader.start()
        self._writer.start()

    async def wait_ready(self) -> EngineReady | EngineFailed:
        """What loading came to. Never raises: the caller decides what a failure means."""
        await self._decided.wait()
        outcome = self.ready or self.failure
        return outcome if outcome is not None else EngineFailed("The engine was closed while it loaded.", False)

    async def close(self, limit_s: float = 10.0) -> None:
        """Ask the engine to end, wait at most `limit_s`, then kill it. Harmless when called twice or before start.

        One that still loads is killed at once: it holds nobody's work and would not look up for seconds.
        """
        if self.state is EngineState.CLOSED:
            return
        was_loading = self.state is EngineState.LOADING
        self.state = EngineState.CLOSED
        self._decided.set()
        self._open.clear()
        if not hasattr(self, "_process"):
            return
        if was_loading:
            self._process.kill()
        self._backlog.put(Shutdown())
        self._backlog.put(None)
        await asyncio.to_thread(self._end_process, limit_s)
        await asyncio.to_thread(self._reader.join, EXIT_WAIT_S)
        self._connection.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if hasattr(self, "_process") else None

    @property
    def alive(self) -> bool:
        """Loading or ready: the process is there, as far as its pipe tells."""
        return self.state in (EngineState.LOADING, EngineState.READY)

    @property
    def is_silent(self) -> bool:
        """The model is loaded, and its process has not given a sign of life for seconds: stopped, or hung."""
        return self.state is EngineState.READY and self._heartbeat.is_silent

    def require_heard(self) -> None:
        """ApiError 503 while the engine is silent."""
        if self.is_silent:
            raise ApiError(503, "worker_stalled", "This worker's engine gives no sign of life; ask another one.",
                           headers={"Retry-After": RETRY_AFTER_S})

    # -- commands -----------------------------------------------------------------------------------------------

    def submit(self, *sequences: SubmitSequence) -> None:
        """Queue all choices of a request, or none: ApiError 503 when there is no engine, 429 when it is full."""
        self._require_ready()
        num_commands = self._backlog.qsize() + len(sequences)
        if len(self._open) + len(sequences) > self._open_max or num_commands > COMMAND_BACKLOG_MAX:
            raise ApiError(429, "queue_full", f"The worker already holds {len(self._open)} sequences (its limit is "
                           f"{self._open_max}); try again later.", headers={"Retry-After": retry_after_s(self.stats)})
        for sequence in sequences:
            self._open[sequence.request_id, sequence.choice] = False
            self._backlog.put(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop a request, or one choice of it. Unknown, finished and already aborted ones are no news."""
        keys = [key for key, aborted in self._open.items()
                if key[0] == request_id and choice in (None, key[1]) and not aborted]
        if not keys:
            return
        for key in keys:
            self._open[key] = True
        self._backlog.put(AbortRequest(request_id, choice))

    def reset(self) -> None:
        """Forget every cached block that no running sequence holds."""
        self._require_ready()
        if self._backlog.qsize() >= COMMAND_BACKLOG_MAX:
            raise ApiError(429, "queue_full", "Too many commands wait for the engine; try again later.",
                           headers={"Retry-After": RETRY_AFTER_S})
        self._backlog.put(ResetCache())

    @property
    def num_open(self) -> int:
        """Sequences submitted and not yet finished."""
        return len(self._open)

    def _require_ready(self) -> None:
        if self.state is EngineState.LOADING:
            raise ApiError(503, "worker_loading", "The model is still loading; try again in a few seconds.",
                           headers={"Retry-After": RETRY_AFTER_S})
        if self.state is not EngineState.READY:
            reason = self.failure.message if self.failure else "the engine is shut down"
            raise ApiError(503, "worker_failed", f"This worker cannot generate: {reason}")
        self.require_heard()

    # -- reports (event loop) -----------------------------------------------------------------------------------

    def _deliver(self, report: Report | EngineBeat) -> None:
        if self.state in (EngineState.FAILED, EngineState.CLOSED):
            return
        self._heard()
        match report:
            case EngineBeat():
                return
            case EngineReady():
                self.ready, self.state = report, EngineState.READY
                self.stats = _stats_at_start(report)
                self._decided.set()
                self._loop.call_later(LOOK_EVERY_S, self._look)
            case EngineFailed():
                self.failure, self.state = report, EngineState.FAILED
                self._open.clear()
                self._backlog.put(None)
                self._decided.set()
            case StepReport():
                self.stats = report.stats
                for output in report.outputs:
                    if output.finish_reason is not None:
                        self._open.pop((output.request_id, output.choice), None)
        self._on_report(report)

    def _heard(self) -> None:
        if self.is_silent:
            _log.info("engine_heard_again", pid=self.pid)
        self._heartbeat.heard()

    def _look(self) -> None:
        if self.state is not EngineState.READY:
            return
        was_silent = self.is_silent
        self._heartbeat.look()
        if self.is_silent and not was_silent:
            _log.warning("engine_silent", pid=self.pid, silent_s=SILENT_LOOKS * LOOK_EVERY_S, open=self.num_open,
                         reason="its process is stopped or hangs", remedy="restart the worker if it stays so")
        self._loop.call_later(LOOK_EVERY_S, self._look)

    # -- threads ------------------------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        with contextlib.suppress(RuntimeError):          # the loop is closed: nobody is left to tell
            while True:
                try:
                    report: Report | EngineBeat = self._connection.recv()
                except (EOFError, OSError):
                    break
                self._loop.call_soon_threadsafe(self._deliver, report)
            failure = EngineFailed(_death_notice(self._wait_or_kill(EXIT_WAIT_S)), users_fault=False)
            self._loop.call_soon_threadsafe(self._deliver, failure)

    def _write_commands(self, config: EngineConfig) -> None:
        with contextlib.suppress(OSError):               # a dead process is reported by the reader
            self._connection.send(config)
            while (command := self._backlog.get()) is not None:
                self._connection.send(command)

    def _end_process(self, limit_s: float) -> None:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._wait_or_kill(min(limit_s, 1.0))

    def _wait_or_kill(self, limit_s: float) -> int:
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def retry_after_s(stats: EngineStats) -> str:
    """When a refused client may try again: about when half of the prefill that waits now will have been computed."""
    tokens = stats.waiting_prefill_tokens + stats.running_prefill_tokens
    wait_s = tokens / stats.prefill_tokens_per_s / 2 if stats.prefill_tokens_per_s > 0 else 0.0
    return str(min(RETRY_AFTER_MAX_S, max(int(RETRY_AFTER_S), math.ceil(wait_s))))


def _stats_at_start(ready: EngineReady) -> EngineStats:
    return EngineStats(blocks_total=ready.num_blocks, blocks_free=ready.num_blocks,
                       prefill_tokens_per_s=ready.prefill_tokens_per_s, decode_step_s=ready.decode_step_s)


def _death_notice(exit_code: int) -> str:
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"
    remedy = " (out of memory? lower --kv-memory)" if exit_code == -9 else "; its last lines on stderr say why"
    return f"The engine process {how}{remedy}. Restart the worker."


def _environment(config: EngineConfig) -> dict[str, str]:
    """The child's environment: thread counts must be there before torch is imported.

    Threads without work soon sleep, or at once where OMP_WAIT_POLICY says so, as `headstart up` and others do who put
    several processes on the same cores.
    """
    environment = dict(os.environ)
    if config.threads > 0:
        environment["OMP_NUM_THREADS"] = str(config.threads)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)
    environment.setdefault("GLIBC_TUNABLES", MALLOC_TUNABLES)
    if config.exactness == "strict":
        ask_for_strict_products(environment)
    if not sys.stderr.isatty():
        environment.setdefault("TQDM_DISABLE", "1")     # the loader's progress bars are for eyes, not for logs
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)   # the very modules we run
    return environment
