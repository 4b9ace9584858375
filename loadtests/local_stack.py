"""Starts headstart's own commands as children and waits until they serve. For demos, benchmarks and tests.

Owns the child processes it starts, and nothing else: it never signals a process that it did not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

READY_TIMEOUT_S = 300.0  # the first start converts the packaged model
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1


class StackError(Exception):
    """A child did not start; the message carries the end of its log."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Child:
    """One started command. `log` collects its output; `url` is where it will serve."""

    process: subprocess.Popen[bytes]
    url: str
    log: IO[bytes]
    admin_token: str | None = None
    worker_token: str | None = None

    def log_tail(self, num_bytes: int = 3000) -> str:
        """The last lines the child printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), num_bytes, max(0, size - num_bytes)).decode("utf-8", "replace")

    def wait_ready(self, path: str = "/readyz", timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when `path` answers 200; raise StackError when the child ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StackError(f"ended with exit code {self.process.returncode}:\n{self.log_tail()}")
            if _answers(self.url + path):
                return
            time.sleep(POLL_S)
        raise StackError(f"{self.url}{path} was not ready after {timeout_s:.0f} s:\n{self.log_tail()}")

    def wait_workers_ready(self, num_workers: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """As wait_ready, until the gateway lists so many ready workers: it is ready itself from the first one on."""
        deadline = time.monotonic() + timeout_s
        while (states := self._worker_states()).count("ready") < num_workers:
            if self.process.poll() is not None:
                raise StackError(f"ended with exit code {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() >= deadline:
                raise StackError(f"workers after {timeout_s:.0f} s: {', '.join(states)}:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def wait_workers_known(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """As wait_ready, until the gateway has understood every worker, also one that it will not use."""
        deadline = time.monotonic() + timeout_s
        while "unready" in (states := self._worker_states()):
            if time.monotonic() >= deadline:
                raise StackError(f"workers after {timeout_s:.0f} s: {', '.join(states)}:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def _worker_states(self) -> list[str]:
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        request = urllib.request.Request(f"{self.url}/admin/workers", headers=headers)
        with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as response:
            return [str(worker["state"]) for worker in json.load(response)["workers"]]

    def stop(self) -> None:
        """SIGINT, as Ctrl-C does, then SIGKILL to this child alone when it does not end in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def start(arguments: Sequence[str], *, url: str, env: dict[str, str] | None = None,
          hears_ctrl_c: bool = True) -> Child:
    """Start `python -m ARGUMENTS` as a child. It is not waited for."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by Child.stop
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **(env or {})},
        start_new_session=not hears_ctrl_c,
    )
    return Child(process=process, url=url, log=log)


@contextlib.contextmanager
def _running(child: Child, *, wait: bool) -> Iterator[None]:
    try:
        if wait:
            child.wait_ready()
        yield
    finally:
        child.stop()


@contextlib.contextmanager
def running_stack(*, workers: int, model: str, arguments: Sequence[str] = (), wait: bool = True) -> Iterator[Child]:
    """`headstart up` on a free port: yields it when its gateway lists every worker ready, stops it at the end."""
    port = free_port()
    token = secrets.token_hex(16)
    worker_token = secrets.token_hex(16)
    child = start(
        ["gateway.cli", "up", "--port", str(port), "--workers", str(workers), "--model", model, *arguments],
        url=f"http://127.0.0.1:{port}",
        env={"HEADSTART_ADMIN_TOKEN": token, "HEADSTART_WORKER_TOKEN": worker_token},
    )
    child.admin_token, child.worker_token = token, worker_token
    with _running(child, wait=wait):
        if wait:
            child.wait_workers_ready(workers)
        yield child


@contextlib.contextmanager
def running_worker(
    *, model: str, arguments: Sequence[str] = (), env: dict[str, str] | None = None, wait: bool = True
) -> Iterator[Child]:
    """One `headstart worker` alone on a free port."""
    port = free_port()
    child = start(
        ["worker", "--model", model, "--port", str(port), *arguments], url=f"http://127.0.0.1:{port}", env=env
    )
    with _running(child, wait=wait):
        yield child
