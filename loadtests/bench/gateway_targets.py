"""The gateways that are measured: ours with everything on, and how each peer is started, or why it is not.

Owns the child processes, and the two cores: what is measured runs on the last one, everything else on the others.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gateway.admission.tenants import hash_key
from loadtests.local_stack import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
STOP_S = 5.0
# Caps that are reached in the first half of what is sent: from there on memory has to be flat.
INDEX_CAP_BYTES, TEXT_CAP_BYTES = 16 << 20, 8 << 20
DIRECT, OURS, CAPPED = "direct", "headstart", "headstart, caps of 16 + 8 MiB"
_CAPS = ["--index-max-bytes", str(INDEX_CAP_BYTES), "--text-memory-bytes", str(TEXT_CAP_BYTES)]
_LIMITS = "requests_per_minute = 1e9\ntokens_per_minute = 1e12\nmax_concurrent = 10000\n"
_TELL = """import sys, sysconfig
print(' '.join(sys.version.split()))
print(sysconfig.get_config_var('CONFIG_ARGS'))"""
_NGINX = """worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream workers {{ {servers} keepalive 128; }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m; client_body_buffer_size 256k; keepalive_requests 1000000;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers' programs are; a name is looked for on PATH. `python` runs ours, and what else is Python."""

    nginx: str = "nginx"
    sglang_router: str = "sglang-router"
    vllm_router: str = "vllm-router"
    python: str = sys.executable


@dataclass(slots=True)
class Target:
    """One running gateway. `key` is what clients send to it."""

    name: str
    version: str
    pid: int
    port: int
    key: str
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, figure: str, value: float) -> None:
        """One round's value."""
        self.figures.setdefault(figure, []).append(value)


class Bench:
    """The workers, and whatever is started in front of them. Everything ends with the `with` block."""

    def __init__(self, folder: Path, peers: Peers, *, num_workers: int) -> None:
        self.folder = folder
        self.peers = peers
        self.key = secrets.token_hex(16)
        self._token = secrets.token_hex(16)
        self._stack = contextlib.ExitStack()
        self._ports = [free_port() for _ in range(num_workers)]
        self._cores = sorted(os.sched_getaffinity(0))
        self._ends: dict[int, Callable[[], None]] = {}
        self._last_pid = 0

    def __enter__(self) -> Bench:
        self._stack.callback(os.sched_setaffinity, 0, self._cores)
        os.sched_setaffinity(0, self._cores[:-1] or self._cores)
        ports = [part for port in self._ports for part in ("--port", str(port))]
        self.worker_pid = self._start("worker", [sys.executable, "-m", "loadtests.bench.relay_worker", *ports],
                                      is_measured=False)
        for worker in self._workers:
            self._until(worker + "/kv", b"bench")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _workers(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def direct(self) -> Target:
        """The first worker itself."""
        return Target(DIRECT, "", self.worker_pid, self._ports[0], self.key)

    def start(self, name: str) -> Target | str:
        """The target called so, serving; or in words why there is none."""
        starters: dict[str, Callable[[str, int], str]] = {
            OURS: self._headstart, CAPPED: self._headstart, "nginx": self._nginx,
            "aiohttp": self._aiohttp, "bare relay": self._bare_relay,
            "sglang-router": self._sglang_router, "vllm-router": self._vllm_router}
        port = free_port()
        try:
            version = starters[name](name, port)
            self._until(f"http://127.0.0.1:{port}{'/livez' if name in (OURS, CAPPED) else '/health'}", b"")
            if name in (OURS, CAPPED):
                self._until(f"http://127.0.0.1:{port}/admin/workers", b'"knowledge":"exact"', times=len(self._ports))
        except (OSError, RuntimeError) as problem:
            return str(problem)
        return Target(name, version, self._last_pid, port, self.key)

    def stop(self, target: Target) -> None:
        """End this target's processes now."""
        self._ends.pop(target.pid)()

    # ---- one starter each; the version is what they return -------------------------------------------------------

    def start_processes(self, number: int) -> Target:
        """Ours with so many processes; RuntimeError when they do not come up."""
        port, name = free_port(), f"{number} process{'es' if number > 1 else ''}"
        version = self._headstart(name, port, f"--processes={number}")
        for _ in range(4 * number):  # each look meets some process
            self._until(f"http://127.0.0.1:{port}/admin/workers", b'"knowledge":"exact"', times=len(self._ports))
        return Target(name, version, self._last_pid, port, self.key)

    def _headstart(self, name: str, port: int, *arguments: str) -> str:
        keys = self.folder / f"keys-{port}.toml"
        keys.write_text(f'[[tenants]]\nid = "bench"\nkeys = ["{hash_key(self.key)}"]\n{_LIMITS}')
        workers = [part for worker in self._workers for part in ("--worker", worker)]
        cap = _CAPS if name == CAPPED else []
        self._start(name, [self.peers.python, "-m", "gateway.cli", "gateway", "--port", str(port), "--keys-file",
                           str(keys), *workers, *cap, *arguments])
        return _commit()

    def _nginx(self, name: str, port: int) -> str:
        program = _program(self.peers.nginx)
        settings = self.folder / "nginx.conf"
        servers = " ".join(f"server 127.0.0.1:{worker};" for worker in self._ports)
        settings.write_text(_NGINX.format(folder=self.folder, port=port, servers=servers))
        self._start(name, [program, "-p", str(self.folder), "-c", str(settings)])
        found = subprocess.run([program, "-v"], capture_output=True, text=True, check=False)
        return found.stderr.strip().rpartition("/")[2]

    def _sglang_router(self, name: str, port: int) -> str:
        program = _program(self.peers.sglang_router)
        self._start(name, [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
                           "--prometheus-port", str(free_port()), "--log-level", "warn",
                           "--worker-urls", *self._workers])
        return _installed(program, "sglang-router") + " cache_aware"

    def _vllm_router(self, name: str, port: int) -> str:
        program = _program(self.peers.vllm_router)
        self._start(name, [program, "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash",
                           "--prometheus-port", str(free_port()), "--log-level", "warning",
                           "--worker-urls", *self._workers])
        return _installed(program, "vllm-router") + " consistent_hash"

    def _aiohttp(self, name: str, port: int) -> str:
        workers = [part for worker in self._workers for part in ("--worker", worker)]
        self._start(name, [self.peers.python, "-m", "loadtests.bench.aiohttp_proxy", "--port", str(port), *workers])
        return importlib.metadata.version("aiohttp")

    def _bare_relay(self, name: str, port: int) -> str:
        workers = [part for worker in self._workers for part in ("--worker", worker)]
        self._start(name, [self.peers.python, "-m", "loadtests.bench.bare_relay", "--port", str(port), *workers])
        return importlib.metadata.version("uvloop")

    # ---- processes -----------------------------------------------------------------------------------------------

    def _start(self, name: str, command: list[str], *, is_measured: bool = True) -> int:
        log = self._stack.enter_context((self.folder / f"{name.replace(' ', '-')}.log").open("wb"))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HEADSTART_WORKER_TOKEN": self._token,
                       "HEADSTART_ADMIN_TOKEN": self._token}
        cores = os.sched_getaffinity(0)
        if is_measured:
            os.sched_setaffinity(0, self._cores[-1:])  # children begin where their parent was
        try:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        finally:
            os.sched_setaffinity(0, cores)
        self._last_pid = process.pid
        self._ends[process.pid] = lambda: _end(process)
        self._stack.callback(_end, process)
        return process.pid

    def _until(self, url: str, sign: bytes, times: int = 1) -> None:
        deadline = time.monotonic() + START_S
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._token}"})
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
                if answer.read().count(sign) >= times:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"did not serve {url} within {START_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"not installed: {name} is not on PATH")
    return found


def _installed(program: str, distribution: str) -> str:
    """The version of a distribution in the environment that a console script belongs to."""
    libraries = Path(program).resolve().parents[1].glob("lib/python*/site-packages")
    for found in importlib.metadata.distributions(name=distribution, path=[str(path) for path in libraries]):
        return found.version
    return "?"


def interpreter(python: str) -> str:
    """Version, build and compiler of an interpreter, and what it says of how it was optimised: Debian's says nothing,
    and is."""
    found = subprocess.run([python, "-c", _TELL], check=True, capture_output=True, text=True)
    version, _, flags = found.stdout.strip().partition("\n")
    return ", ".join([version, *(flag for flag in ("--enable-optimizations", "--with-lto") if flag in flags)])


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"], cwd=ROOT,
                           check=True, capture_output=True, text=True)
    return found.stdout.strip()


def processes_of(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from processes_of(int(child))


def cpu_ns(pid: int) -> int:
    """CPU time so far of every thread now alive in a process and those below it."""
    total = 0
    for process in processes_of(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


def memory_kib(pid: int) -> int:
    """Resident memory of a process and those below it."""
    total = 0
    for process in processes_of(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            total += int(status.partition("VmRSS:")[2].split(None, 1)[0])
    return total
