"""`headstart up` as a person runs it: its curl works when pasted, mistakes are one line, nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.tenants import hash_key
from loadtests.local_stack import free_port
from tests.support.tiny_worker import write_tiny_model

START_S = 120.0
STOP_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@contextlib.contextmanager
def running_up(*arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    with open(log, "w") as err, subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "up", *arguments], stdout=subprocess.PIPE, stderr=err, text=True,
            env=environ, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_S)


def fetch(url: str, *, headers: dict[str, str] | None = None, body: str | None = None) -> Any:
    request = urllib.request.Request(url, data=body.encode() if body else None, headers=headers or {})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def pasted(line: str) -> Any:
    """What the printed curl would get."""
    words = shlex.split(line.partition("try: ")[2])
    assert words[:2] == ["curl", "-s"]
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    return fetch(words[2], headers=headers, body=words[words.index("-d") + 1])


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> list[int]:
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
             for child in (task / "children").read_text().split()]
    return found + [grandchild for child in found for grandchild in children_of(child)]


def eventually(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if value := condition():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not within {START_S:g} s: {what}")


def test_from_the_ready_line_to_ctrl_c(model: Path, tmp_path: Path) -> None:
    port = free_port()
    with running_up("--workers", "2", "--model", str(model), "--served-name", "tiny", "--kv-memory", "4MiB",
                    f"--port={port}", log=tmp_path / "log") as up:
        assert up.stdout is not None
        line = up.stdout.readline()
        assert line.startswith(f"ready: http://127.0.0.1:{port} with 2 workers, "), (tmp_path / "log").read_text()
        answer = pasted(line)
        assert answer["model"] == "tiny"
        assert answer["usage"]["completion_tokens"] > 0

        found = re.search(r"admin token in (\S+),", line)
        assert found is not None
        token_file = Path(found[1])
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        headers = {"Authorization": f"Bearer {token_file.read_text()}"}
        workers = fetch(f"http://127.0.0.1:{port}/admin/workers", headers=headers)["workers"]
        assert [worker["state"] for worker in workers] == ["ready", "ready"]
        processes = children_of(up.pid)
        assert {worker["pid"] for worker in workers} <= set(processes)
        assert not any(token_file.read_text() in Path(f"/proc/{pid}/cmdline").read_text() for pid in processes)

        gateway = next(pid for pid in processes if "\0gateway\0" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(gateway, signal.SIGKILL)
        ready = f"http://127.0.0.1:{port}/readyz"
        eventually(lambda: not alive(gateway) and urllib.request.urlopen(ready, timeout=5), "the gateway to be back")
        processes = [*processes, *children_of(up.pid)]

        up.send_signal(signal.SIGINT)
        assert up.wait(STOP_S) == 0
        assert up.stdout.read() == "", "more than the ready line on standard output"
    eventually(lambda: not any(map(alive, processes)), "every process to be gone")
    assert not token_file.exists()
    assert "[worker-2] " in (tmp_path / "log").read_text()


def test_sigterm_drains_and_exits_0_and_a_client_with_a_key_is_told_so(model: Path, tmp_path: Path) -> None:
    key, keys = "hs-key-of-a-tenant-0001", tmp_path / "keys.toml"
    keys.write_text(f'[[tenants]]\nid = "a"\nkeys = ["{hash_key(key)}"]\n')
    with running_up("--workers", "1", "--model", str(model), "--served-name", "tiny", "--kv-memory", "4MiB",
                    f"--keys-file={keys}", "--drain-delay-s", "0", f"--port={free_port()}",
                    log=tmp_path / "log") as up:
        assert up.stdout is not None
        line = up.stdout.readline()
        assert line.startswith("ready: ")
        assert pasted(line.replace("Bearer KEY", f"Bearer {key}"))["model"] == "tiny"
        up.send_signal(signal.SIGTERM)
        assert up.wait(STOP_S) == 0


def test_a_model_that_is_not_there_ends_the_start_with_one_line(tmp_path: Path) -> None:
    with running_up("--model", str(tmp_path / "none"), f"--port={free_port()}", log=tmp_path / "log") as up:
        assert up.wait(START_S) == 2
        assert up.stdout is not None
        assert up.stdout.read() == ""
    text = (tmp_path / "log").read_text()
    assert text.splitlines()[-1].startswith("headstart worker: there is no model ")
    assert "Traceback" not in text
    assert "starting it again" not in text


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_up(f"--port={port}", log=tmp_path / "log") as up:
            assert up.wait(START_S) == 2
    assert (tmp_path / "log").read_text() == (f"headstart up: cannot listen on 127.0.0.1:{port}: Address already in "
                                              "use; stop what uses it, or choose another --port or --host\n")
