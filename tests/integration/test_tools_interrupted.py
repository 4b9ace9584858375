"""Ctrl-C, a full disk and a folder that cannot be written: what the laboratory's commands still tell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from loadtests.live import command as replay
from loadtests.sim import command as simulate
from tests.architecture.source_tree import ROOT
from tests.support.simulated import TRACES
from tests.support.stub_worker import Seen, StubWorker, answer, never_answer, running

MOONCAKE = str(TRACES / "mooncake_small.jsonl")
# SIGINT may be ignored where the tests run, which a child inherits.
HEADSTART = [sys.executable, "-c", "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
             "from gateway.cli import main; sys.exit(main(sys.argv[1:]))"]


async def replay_until_second(folder: Path, number: signal.Signals) -> tuple[int | None, bytes, bytes]:
    """A replay, one request at a time, to which this signal is sent when its second one has come: status, output and
    errors."""
    stub, second_came = StubWorker(), asyncio.Event()

    async def hold(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        second_came.set()
        return await never_answer(stub, request, seen)

    stub.next_behaviours.extend([answer, hold])
    async with running(stub), asyncio.timeout(120):
        child = await asyncio.create_subprocess_exec(
            *HEADSTART, "replay", MOONCAKE, "--url", stub.url, "--model", "stub", "--token-ids", "10:200",
            "--block-size", "16", "--rate", "1e6", "--max-open", "1", "--report", str(folder),
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        await second_came.wait()
        child.send_signal(number)
        out, err = await child.communicate()
    return child.returncode, out, err


async def test_an_interrupted_replay_tells_what_had_ended(tmp_path: Path) -> None:
    status, out, err = await replay_until_second(tmp_path, signal.SIGINT)
    assert (status, err) == (130, b"")
    assert out.startswith(b"cut short: 1 of 60 requests had ended\n")
    assert b"1 answered, 0 failed" in out
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert (report["cut_short"], report["policies"][0]["requests"]) == (True, 1)
    assert (tmp_path / "requests.jsonl").read_bytes().count(b"\n") == 1


async def test_a_killed_replay_leaves_the_requests_that_had_ended(tmp_path: Path) -> None:
    status, out, _ = await replay_until_second(tmp_path, signal.SIGKILL)
    assert (status, out) == (-signal.SIGKILL, b"")
    [row] = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert json.loads(row)["error"] is None


def test_an_interrupted_simulation_says_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    os.mkfifo(trace)
    child = subprocess.Popen([*HEADSTART, "simulate", str(trace)], cwd=ROOT, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    with trace.open("wb"):   # opens when the other end does
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120) == (b"", b"")
    assert child.returncode == 130


def test_a_result_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*HEADSTART, "simulate", MOONCAKE, "--requests", "5", "--report", str(tmp_path)],
                              cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"cannot write the result to stdout" in done.stderr
    assert json.loads((tmp_path / "report.json").read_bytes())["policies"]


@pytest.mark.parametrize(("main", "arguments"), [
    (replay.main, ["--url", "http://127.0.0.1:9", "--model", "m"]), (simulate.main, [])])
@pytest.mark.parametrize("name", ["", "file", "file/under", "/proc/none"])
def test_a_folder_that_cannot_take_a_report_is_named_before_the_run(
        main: Callable[[list[str]], int], arguments: list[str], name: str, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        main([MOONCAKE, *arguments, "--report", str(tmp_path / name) if name else ""])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert "--report" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
