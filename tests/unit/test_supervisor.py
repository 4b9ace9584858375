"""The supervisor with real, tiny children: output, restarts, start failures, stops obeyed and not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import gateway.supervisor as module
from gateway.supervisor import ChildSpec, Supervisor

WAIT_S = 20.0


def python(name: str, code: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), dict(os.environ))


IDLE = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + IDLE


class Lines(list[str]):
    """What the supervisor said, and a way to wait for a line."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def say(self, line: str) -> None:
        self.append(line)
        self._news.set()

    async def wait_for(self, wanted: str, count: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while sum(wanted in line for line in self) < count:
                self._news.clear()
                await self._news.wait()


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def supervised(specs: list[ChildSpec], story: Callable[[Supervisor, Lines], Awaitable[None]]) -> Lines:
    lines = Lines()
    supervisor = Supervisor(specs, say=lines.say)
    supervisor.start()
    try:
        await story(supervisor, lines)
    finally:
        supervisor.kill()
        await supervisor.stop(signal.SIGKILL, limit_s=WAIT_S)
    assert supervisor.pids() == {}
    return lines


async def test_output_is_passed_on_with_the_name_in_front() -> None:
    async def story(_: Supervisor, lines: Lines) -> None:
        await lines.wait_for("[b] up")
        await lines.wait_for("[a] up")
        assert {"[a] é", "[a] err"} <= set(lines)

    await supervised([python("a", "import sys; print('é'); print('err', file=sys.stderr, flush=True);" + IDLE),
                      python("b", IDLE)], story)


async def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_MAX_BYTES", 1000)

    async def story(_: Supervisor, lines: Lines) -> None:
        await lines.wait_for("xxx", 3)
        assert all(len(line) <= 1000 + module.OUTPUT_CHUNK_BYTES for line in lines)

    await supervised([python("a", f"import sys; sys.stdout.write('x' * 300_000); sys.stdout.flush(); {IDLE}")], story)


async def test_a_settled_child_is_restarted_and_stop_ends_it() -> None:
    async def story(supervisor: Supervisor, lines: Lines) -> None:
        await lines.wait_for("up")
        supervisor.settle()
        first = supervisor.pids()["a"]
        os.kill(first, signal.SIGKILL)
        await lines.wait_for("up", 2)
        assert "a was ended by SIGKILL; starting it again in 0.25 s" in lines
        second = supervisor.pids()["a"]
        assert second != first
        await supervisor.stop(signal.SIGTERM, limit_s=WAIT_S)
        assert not alive(second)
        assert not supervisor.failed.done()

    await supervised([python("a", IDLE)], story)


async def test_the_delay_doubles_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 0.04)

    async def story(supervisor: Supervisor, lines: Lines) -> None:
        supervisor.settle()
        await lines.wait_for("starting it again in 0.04 s", 2)

    lines = await supervised([python("a", "raise SystemExit(3)")], story)
    delays = [line.rpartition(" in ")[2] for line in lines if "again" in line]
    assert delays[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]


async def test_a_users_mistake_ends_the_start_at_once_with_its_line() -> None:
    async def story(supervisor: Supervisor, _: Lines) -> None:
        failure = await asyncio.wait_for(supervisor.failed, WAIT_S)
        assert (failure.name, failure.exit_code, failure.last_line) == ("a", 2, "no such model: give another --model")

    lines = await supervised([python("a", "print('no such model: give another --model'); raise SystemExit(2)"),
                              python("b", IDLE)], story)
    assert not any("again" in line for line in lines)


async def test_a_child_that_cannot_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)

    async def story(supervisor: Supervisor, _: Lines) -> None:
        failure = await asyncio.wait_for(supervisor.failed, WAIT_S)
        assert failure.exit_code == 7

    lines = await supervised([python("a", "raise SystemExit(7)")], story)
    assert sum("again" in line for line in lines) == module.START_DEATHS_MAX - 1


async def test_who_does_not_stop_in_time_is_killed() -> None:
    async def story(supervisor: Supervisor, lines: Lines) -> None:
        await lines.wait_for("up", 2)
        pids = supervisor.pids()
        await supervisor.stop(signal.SIGTERM, limit_s=0.2, names=["a"])
        assert not alive(pids["a"])
        assert alive(pids["b"])
        assert "a did not stop within 0.2 s: killed" in lines
        await supervisor.stop(signal.SIGTERM, limit_s=WAIT_S)
        assert not alive(pids["b"])

    await supervised([python("a", STUBBORN), python("b", IDLE)], story)


async def test_impatience_kills_at_once() -> None:
    async def story(supervisor: Supervisor, lines: Lines) -> None:
        await lines.wait_for("up")
        stopping = asyncio.create_task(supervisor.stop(signal.SIGTERM, limit_s=60))
        await asyncio.sleep(0)
        supervisor.kill()
        await asyncio.wait_for(stopping, WAIT_S)

    await supervised([python("a", STUBBORN)], story)


async def test_a_death_during_the_pause_before_a_restart_does_not_delay_the_stop(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 60.0)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 60.0)

    async def story(supervisor: Supervisor, lines: Lines) -> None:
        supervisor.settle()
        await lines.wait_for("again in 60 s")
        await asyncio.wait_for(supervisor.stop(signal.SIGTERM, limit_s=60), WAIT_S)

    await supervised([python("a", "pass")], story)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_children_die_with_a_supervisor_that_is_killed_outright() -> None:
    code = ("import asyncio, sys; from gateway.supervisor import *\n"
            "async def main():\n"
            f"    spec = ChildSpec('a', (sys.executable, '-c', {IDLE!r}), dict(os.environ))\n"
            "    s = Supervisor([spec], say=lambda _: print(s.pids()['a'], flush=True))\n"
            "    s.start()\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + WAIT_S
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)
