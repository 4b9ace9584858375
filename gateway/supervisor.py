"""Keeps child processes running: starts them, passes their output on, restarts the dead, stops them all.

Owns the processes that it started and nothing else: it never signals any other. Must never: know what a child does;
it judges by exit status and by how long a child lived.

A child that says "a user's mistake" (exit 2), or that dies several times, before the whole stack was ever up, ends
the start: looping would hide the reason. Later, every death is answered by a restart, after a delay that doubles.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

EXIT_USAGE = 2
BACKOFF_S = 0.25
BACKOFF_MAX_S = 30.0
STEADY_AFTER_S = 30.0       # a child that lived this long starts again without a grudge
START_DEATHS_MAX = 3
OUTPUT_CHUNK_BYTES = 65_536
LINE_MAX_BYTES = 1024 * 1024
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: its name in the output, its command and its whole environment."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why the stack cannot come up: the child's last line, and whose fault it says it was."""

    name: str
    exit_code: int
    last_line: str


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: Process | None = None
    deaths: int = 0
    last_line: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Supervisor:
    """start(), then wait for `failed` or for your own reasons, then stop(). `say` gets each line of output once."""

    def __init__(self, specs: Sequence[ChildSpec], *, say: Callable[[str], None]) -> None:
        self.failed: asyncio.Future[StartFailure] = asyncio.get_running_loop().create_future()
        self._children = [_Child(spec) for spec in specs]
        self._say = say
        self._settled = False
        self._stopping = asyncio.Event()

    def start(self) -> None:
        for child in self._children:
            child.tasks.append(asyncio.create_task(self._keep_running(child)))

    def settle(self) -> None:
        """The whole stack is up: from now on every death is answered by a restart."""
        self._settled = True

    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now."""
        return {child.spec.name: child.process.pid for child in self._children
                if child.process is not None and child.process.returncode is None}

    async def stop(self, *signums: signal.Signals, limit_s: float, names: Sequence[str] | None = None) -> None:
        """Signal the named children (or all), wait, kill those that outlive `limit_s`. Nothing is restarted after."""
        self._stopping.set()
        chosen = [child for child in self._children if names is None or child.spec.name in names]
        for signum in signums:
            for child in chosen:
                _signal(child, signum)
        watchers = [task for child in chosen for task in child.tasks]
        if watchers:
            await asyncio.wait(watchers, timeout=limit_s)
        for child in chosen:
            if _running(child):
                self._say(f"{child.spec.name} did not stop within {limit_s:g} s: killed")
                _signal(child, signal.SIGKILL)
        await asyncio.gather(*watchers)

    def kill(self) -> None:
        """End every child at once; stop(), which may be waiting, then returns."""
        self._stopping.set()
        for child in self._children:
            _signal(child, signal.SIGKILL)

    async def _keep_running(self, child: _Child) -> None:
        while not self._stopping.is_set():
            started_at = time.monotonic()
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            child.deaths = 1 if time.monotonic() - started_at > STEADY_AFTER_S else child.deaths + 1
            if not self._settled and (code == EXIT_USAGE or child.deaths >= START_DEATHS_MAX):
                if not self.failed.done():
                    self.failed.set_result(StartFailure(child.spec.name, code, child.last_line))
                return
            delay_s = backoff_s(child.deaths)
            self._say(f"{child.spec.name} {in_words(code)}; starting it again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self, child: _Child) -> int:
        child.process = process = await asyncio.create_subprocess_exec(
            *child.spec.argv, env=dict(child.spec.environ), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop the children in order
            preexec_fn=dying_with_parent())
        assert process.stdout is not None
        if self._stopping.is_set():
            process.kill()  # stop() came while it was being started and could not see it
        reading = asyncio.create_task(self._pass_on(child, process.stdout))
        code = await process.wait()
        # A grandchild may hold the pipe open; what it still says is of no interest to us.
        await asyncio.wait([reading], timeout=BACKOFF_S)
        reading.cancel()
        return code

    async def _pass_on(self, child: _Child, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(OUTPUT_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_MAX_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._one_line(child, line)
        if rest:
            self._one_line(child, rest)

    def _one_line(self, child: _Child, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        child.last_line = text or child.last_line
        self._say(f"[{child.spec.name}] {text}")


def backoff_s(deaths: int) -> float:
    """How long after so many deaths in a row a child starts again."""
    return min(BACKOFF_S * 2.0 ** (deaths - 1), BACKOFF_MAX_S)


def python_command() -> tuple[str, ...]:
    """How a child of ours begins: this Python, told which modules are ours."""
    # -m looks in the current folder first; somebody's own ./worker must not be taken for ours.
    at_home = Path(__file__).parent.parent == Path.cwd()
    return (sys.executable, "-m") if at_home else (sys.executable, "-P", "-m")


def _running(child: _Child) -> bool:
    return child.process is not None and child.process.returncode is None


def _signal(child: _Child, signum: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        child.process.send_signal(signum)


def in_words(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was ended by {signal.Signals(-code).name}"


def dying_with_parent() -> Callable[[], None] | None:
    """What a child runs first, so that it is ended when its supervisor is killed outright (Linux; elsewhere None)."""
    return partial(_die_with_parent, os.getpid()) if _libc else None


def _die_with_parent(parent_pid: int) -> None:
    """Runs in the child before it becomes its program: end it when the supervisor is killed outright (Linux)."""
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(1)
