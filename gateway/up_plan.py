"""What `headstart up` was asked for, checked before any process starts, and the children that follow from it.

Owns: which flags go to whom, the threads and ports of the workers, the secrets in the children's environments. Must
never: start anything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.config import GatewayConfig
from gateway.supervisor import ChildSpec
from worker.config import WorkerConfig
from worker.protocol.command_line import EXIT_OK, CommandParser, add_flags, exit_with_problems
from worker.protocol.settings import SettingsError, flag_specs, load_settings, render_settings

PROG = "headstart up"
WORKERS_MAX = 256
SECRET_BYTES = 32
# Each worker's port and the gateway's list of workers are ours to say.
_GATEWAY_SKIPS = ("workers", "admin_token_file")
_WORKER_SKIPS = ("host", "port", "events_host", "events_port")


@dataclass(frozen=True, slots=True)
class UpPlan:
    """What was asked for: both configurations as the children will see them, and the flags to pass on."""

    num_workers: int
    gateway: GatewayConfig
    worker: WorkerConfig
    gateway_flags: tuple[str, ...]
    worker_flags: tuple[str, ...]

    @property
    def url(self) -> str:
        """Where this machine's clients reach the gateway."""
        return self._url(self.gateway.port)

    @property
    def ops_url(self) -> str:
        """Where its probes answer."""
        return self._url(self.gateway.ops_port or self.gateway.port)

    def _url(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.gateway.host, self.gateway.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_plan(argv: Sequence[str] | None, environ: Mapping[str, str]) -> UpPlan:
    """Everything that can be wrong is told before any process starts. SystemExit after --help or a mistake."""
    parser = CommandParser(PROG, summary="Run a gateway and its workers on this machine; Ctrl-C ends them all.\n"
                           "Takes the flags of `headstart gateway` and `headstart worker` and passes them on.",
                           example="headstart up --workers 2 --model smollm2 --port 8000")
    parser.add_argument("--workers", dest="num_workers", metavar="N", default="2",
                        help="worker processes (default 2)")
    parser.add_argument("--print-config", action="store_true", help="show both outcomes, secrets masked, and stop")
    add_flags(parser, GatewayConfig, skip=_GATEWAY_SKIPS)
    add_flags(parser, WorkerConfig, skip=_WORKER_SKIPS)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    num_workers, problems = _number_of_workers(given.pop("num_workers"))
    print_config = given.pop("print_config")
    gateway_given = _for_kind(given, GatewayConfig)
    worker_given = _for_kind(given, WorkerConfig, skip=_WORKER_SKIPS)
    gateway = _load(GatewayConfig, gateway_given, environ, problems)
    worker = _load(WorkerConfig, worker_given, environ, problems)
    if problems:
        exit_with_problems(PROG, list(dict.fromkeys(problems)))
    if worker.threads == "auto":
        worker_given["threads"] = str(max(1, num_cores() // num_workers))
        worker = replace(worker, threads=worker_given["threads"])
    if print_config:
        sys.stdout.write(f"# gateway\n{render_settings(gateway)}\n# each worker\n{render_settings(worker)}")
        raise SystemExit(EXIT_OK)
    return UpPlan(num_workers, gateway, worker, _as_flags(gateway_given, GatewayConfig),
                  _as_flags(worker_given, WorkerConfig))


def child_specs(plan: UpPlan, admin_token: str, environ: Mapping[str, str]) -> list[ChildSpec]:
    """The gateway first, then the workers, each with its command and its environment."""
    token = plan.gateway.worker_token or plan.worker.worker_token or _secret()
    shared = {**environ, "HEADSTART_WORKER_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    shared.pop("HEADSTART_ADMIN_TOKEN", None)  # the workers have no use for it
    of_worker = {**shared, "HEADSTART_HASH_SEED": plan.worker.hash_seed or _secret(),
                 "OMP_NUM_THREADS": plan.worker.threads, "OMP_WAIT_POLICY": "PASSIVE"}
    ports = free_ports(plan.num_workers)
    urls = [f"--worker=http://127.0.0.1:{port}" for port in ports]
    # -m looks in the current folder first; somebody's own ./worker must not be taken for ours.
    at_home = Path(__file__).parent.parent == Path.cwd()
    python = (sys.executable, "-m") if at_home else (sys.executable, "-P", "-m")
    gateway = ChildSpec("gateway", (*python, "gateway", *plan.gateway_flags, *urls),
                        {**shared, "HEADSTART_ADMIN_TOKEN": admin_token})
    workers = [ChildSpec(f"worker-{number}", (*python, "worker", *plan.worker_flags, "--host=127.0.0.1",
                                              f"--port={port}", "--events-host=127.0.0.1", "--events-port=0"),
                         of_worker) for number, port in enumerate(ports, 1)]
    return [gateway, *workers]


def worker_urls(specs: Sequence[ChildSpec]) -> list[str]:
    """The workers' addresses, as the gateway was told them."""
    return [flag.removeprefix("--worker=") for flag in specs[0].argv if flag.startswith("--worker=")]


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that were free a moment ago; all are held until the last is found."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def port_problem(host: str, port: int) -> str | None:
    """One line with a remedy when nothing can listen there, or None."""
    if port == 0:
        return "--port: should be a port of its own, not 0: clients must know it"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return f"cannot listen on {host}:{port}: {reason}; stop what uses it, or choose another --port or --host"


def num_cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _number_of_workers(text: str) -> tuple[int, list[str]]:
    if text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= WORKERS_MAX:
        return int(text), []
    return 1, [f"--workers: should be a number from 1 to {WORKERS_MAX}, got {text!r}"]


def _load(kind: type[Any], flags: Mapping[str, Any], environ: Mapping[str, str], problems: list[str]) -> Any:
    prefix = "HEADSTART_WORKER_" if kind is WorkerConfig else "HEADSTART_GATEWAY_"
    path = Path(environ[prefix + "CONFIG"]) if environ.get(prefix + "CONFIG") else None
    try:
        return load_settings(kind, flags=flags, environ=environ, env_prefix=prefix, toml_path=path)
    except SettingsError as error:
        problems += error.lines
        return None


def _for_kind(given: Mapping[str, Any], kind: type, *, skip: Sequence[str] = ()) -> dict[str, Any]:
    names = {spec.name for spec in flag_specs(kind)} - set(skip)
    return {name: value for name, value in given.items() if name in names}


def _as_flags(given: Mapping[str, Any], kind: type) -> tuple[str, ...]:
    flags = {spec.name: spec.flag for spec in flag_specs(kind)}
    return tuple(f"{flags[name]}={value}" for name, value in given.items())


def _secret() -> str:
    return secrets.token_hex(SECRET_BYTES)
