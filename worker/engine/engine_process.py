"""The engine's own process: drain commands, step, send one report; again. Run as `python -m` by EngineClient.

Owns the loop and the process's manners (signals, name, exit status). It decides nothing about sequences (engine.py).
It never outlives its shell: the thread that reads commands sees the pipe close and ends the process at once, also in
the middle of a step or of loading. Exit status: 0 asked to end, 1 our failure, 2 a wrong setting.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from worker.engine.engine_config import EngineConfig, EngineSetupError
from worker.engine.heartbeat import BEAT_EVERY_S
from worker.engine.messages import (
    AbortRequest,
    Command,
    EngineBeat,
    EngineFailed,
    Report,
    Shutdown,
    SubmitSequence,
)
from worker.protocol.collector import spare_what_lives
from worker.protocol.logs import configure_logging

if TYPE_CHECKING:
    from worker.engine.engine import Engine

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
PROCESS_NAME = b"hs-engine"              # at most 15 bytes: what top and ps -L show
PR_SET_NAME = 15
logger = logging.getLogger("headstart.engine")

Send = Callable[[Report], None]


@dataclass(frozen=True, slots=True)
class FinishWork:
    """SIGTERM's command to ourselves: finish the sequences at hand, then exit 0. The shell sends Shutdown instead."""


class ReportPipe:
    """Reports and beats of several threads, one whole message after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, report: Report | EngineBeat) -> None:
        """Raises BrokenPipeError when the shell is gone."""
        with self._lock:
            self._connection.send(report)


def start_beats(send: Callable[[EngineBeat], None], every_s: float = BEAT_EVERY_S) -> None:
    """An EngineBeat now and then from a thread of its own. Steps compute without the interpreter's lock, so that a
    long one holds no beat up; a process that is stopped, or holds the lock for good, sends none."""
    threading.Thread(target=_beat, args=(send, every_s), name="heartbeat", daemon=True).start()


def _beat(send: Callable[[EngineBeat], None], every_s: float) -> None:
    with contextlib.suppress(OSError):      # the shell is gone: the command reader ends the process
        while True:
            send(EngineBeat())
            time.sleep(every_s)


class CommandInbox:
    """Commands as they arrive, read off the pipe by a thread so that the shell's writes never wait for a step.

    Bounded by the shell: EngineClient keeps at most `max_running + max_waiting` sequences open. Commands with a
    grammar go through `prepare` in a second thread: what takes long there holds up no step and no other command, but
    the later ones of its own request, among which an abort must find what it ends.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.prepare: Callable[[Command], None] = lambda command: None
        self._queue: queue.SimpleQueue[Command | FinishWork] = queue.SimpleQueue()
        self._to_prepare: queue.SimpleQueue[SubmitSequence | AbortRequest] = queue.SimpleQueue()
        self._in_preparation: Counter[str] = Counter()      # commands by request id
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._read, name="command-reader", daemon=True).start()
        threading.Thread(target=self._prepare, name="command-preparer", daemon=True).start()

    def put(self, command: Command | FinishWork) -> None:
        self._queue.put(command)

    def drain(self, *, wait: bool) -> Iterator[Command | FinishWork]:
        """Every command that is there; with `wait`, sleep until there is at least one."""
        if wait:
            yield self._queue.get()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._queue.get_nowait()

    def _read(self) -> None:
        try:
            while True:
                self._sort(self._connection.recv())
        except (EOFError, OSError):
            os._exit(EXIT_OK)           # the shell is gone, and with it everybody who wanted an answer

    def _sort(self, command: Command) -> None:
        if isinstance(command, SubmitSequence | AbortRequest):
            with self._lock:
                if command.request_id in self._in_preparation or _has_grammar(command):
                    self._in_preparation[command.request_id] += 1
                    self._to_prepare.put(command)
                    return
        self._queue.put(command)

    def _prepare(self) -> None:
        while True:
            command = self._to_prepare.get()
            try:
                self.prepare(command)
            except Exception:           # the engine will meet it again, and refuse this one command
                logger.exception("a command could not be prepared")
            with self._lock:
                self._queue.put(command)
                self._in_preparation[command.request_id] -= 1
                if not self._in_preparation[command.request_id]:
                    del self._in_preparation[command.request_id]


def _has_grammar(command: SubmitSequence | AbortRequest) -> bool:
    return isinstance(command, SubmitSequence) and command.grammar is not None


def main() -> int:
    """Load, say so, serve. The only argument is the pipe's file descriptor; the config comes through the pipe."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _name_process()
    connection = Connection(int(sys.argv[1]))
    inbox = CommandInbox(connection)
    try:
        config: EngineConfig = connection.recv()
    except EOFError:
        return EXIT_OK
    configure_logging(config.log_format, config.log_level)
    inbox.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the shell's to act on
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(FinishWork()))
    with contextlib.suppress(BrokenPipeError):          # the shell left while we were writing to it
        return _load_and_serve(config, inbox, ReportPipe(connection))
    return EXIT_OK


def _load_and_serve(config: EngineConfig, inbox: CommandInbox, pipe: ReportPipe) -> int:
    from worker.engine.engine import Engine  # torch comes in here, after the thread settings

    try:
        engine = Engine(config, clock=time.monotonic)
        ready = engine.load()
        inbox.prepare = engine.prepare
        spare_what_lives()
        pipe.send(ready)
        start_beats(pipe.send)
        return serve(engine, inbox, pipe.send)
    except EngineSetupError as error:
        pipe.send(EngineFailed(str(error), users_fault=True))
        return EXIT_USAGE
    except BrokenPipeError:
        raise
    except Exception as error:
        logger.exception("the engine failed")
        pipe.send(EngineFailed(f"The engine failed: {type(error).__name__}: {error}", users_fault=False))
        return EXIT_FAILED


def serve(engine: Engine, inbox: CommandInbox, send: Send) -> int:
    """Until told to end: apply every waiting command, compute one step, send its report. Sleeps while idle."""
    finishing = False
    while not (finishing and engine.idle):
        for command in inbox.drain(wait=engine.idle):
            match command:
                case FinishWork():
                    finishing = True
                case Shutdown():
                    engine.abort_all()
                    send(engine.step())
                    return EXIT_OK
                case _:
                    engine.apply(command)
        send(engine.step())
        if engine.broken is not None:
            send(EngineFailed(engine.broken, users_fault=False))
            return EXIT_FAILED
    return EXIT_OK


def _name_process() -> None:
    """Best effort: a name is a courtesy to whoever reads top."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, PROCESS_NAME, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
