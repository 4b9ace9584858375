"""What `headstart up` was asked for, checked before any process starts, and the children that follow from it.

Owns: which flags go to whom, the threads and ports of the workers, the secrets in the children's environments. Must
never: start a server, or import the worker: flags that are not the gateway's are the worker's, and the worker's
own command line judges them (`--print-config` in a child).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import GatewayConfig
from gateway.supervisor import ChildSpec, python_command
from worker.protocol.command_line import EXIT_OK, CommandParser, add_flags, exit_with_problems
from worker.protocol.settings import SettingsError, flag_specs, load_settings, render_settings

PROG = "headstart up"
WORKERS_MAX = 256
SECRET_BYTES = 32
CHECK_TIMEOUT_S = 60.0
# The gateway's list of workers, and each worker's addresses, are ours to say.
_OURS = ("workers", "admin_token_file")
_NOT_FOR_WORKERS = ("--host", "--port", "--events-host", "--events-port")
_WHOSE_HELP = ("see headstart worker --help", "see headstart up --help, and headstart worker --help for the workers'")
_GATEWAYS_SECRETS = ("HEADSTART_API_KEYS", "HEADSTART_SALT_SECRET")  # the workers have no use for them
# Flags that both commands know: given once, they go to both.
_FOR_BOTH = ("max_body_bytes", "drain_s", "log_format", "log_level")


@dataclass(frozen=True, slots=True)
class UpPlan:
    """What was asked for: the gateway's configuration, the worker's as it printed it, and the flags for each."""

    num_workers: int
    gateway: GatewayConfig
    worker: Mapping[str, Any]
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

    @property
    def worker_drain_s(self) -> float:
        return float(self.worker["drain_s"])

    @property
    def model(self) -> str:
        return str(self.worker.get("served_name") or self.worker["model"])

    @property
    def needs_keys(self) -> bool:
        """Whether a client is refused without an API key."""
        return self.gateway.keys_file is not None or bool(self.gateway.api_keys)

    def _url(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.gateway.host, self.gateway.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_plan(argv: Sequence[str] | None, environ: Mapping[str, str]) -> UpPlan:
    """Everything that can be wrong is told before any server starts. SystemExit after --help or a mistake."""
    options, for_worker = _parser().parse_known_args(argv)
    given = {name: value for name, value in vars(options).items() if value is not None}
    num_workers, problems = _number_of_workers(given.pop("num_workers"))
    print_config = given.pop("print_config")
    gateway_file, worker_file = ([f"--config={path}"] if (path := given.pop(name, None)) else []
                                 for name in ("gateway_config", "worker_config"))
    worker_flags = [*_as_flags({name: given[name] for name in _FOR_BOTH if name in given}), *worker_file, *for_worker]
    problems += [f"{flag}: `up` has a token file of its own; set HEADSTART_ADMIN_TOKEN to choose the token"
                 for flag in for_worker if flag.partition("=")[0] == "--admin-token-file"]
    problems += [f"{flag}: `up` chooses it for each worker; leave it out" for flag in for_worker
                 if flag.partition("=")[0] in (*_NOT_FOR_WORKERS, "--config")]
    gateway = _gateway_outcome(given, gateway_file, environ, problems)
    worker = _worker_outcome(worker_flags, environ, problems)
    if problems or gateway is None or worker is None:
        exit_with_problems(PROG, list(dict.fromkeys(problems)))
    if worker["threads"] == "auto":
        worker["threads"] = str(max(1, num_cores() // num_workers))
        worker_flags.append(f"--threads={worker['threads']}")
    if print_config:
        shown = "\n".join(f"# {key} = {value!r}" for key, value in worker.items())
        sys.stdout.write(f"# the gateway:\n{render_settings(gateway)}\n# each worker:\n{shown}\n")
        raise SystemExit(EXIT_OK)
    return UpPlan(num_workers, gateway, worker, (*_as_flags(given), *gateway_file), tuple(worker_flags))


def child_specs(plan: UpPlan, admin_token: str, environ: Mapping[str, str]) -> list[ChildSpec]:
    """The gateway first, then the workers, each with its command and its environment."""
    token = environ.get("HEADSTART_WORKER_TOKEN") or plan.gateway.worker_token or _secret()
    shared = {**environ, "HEADSTART_WORKER_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    shared.pop("HEADSTART_ADMIN_TOKEN", None)  # the workers have no use for it
    of_worker = {**shared, "OMP_NUM_THREADS": str(plan.worker["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
    for name in _GATEWAYS_SECRETS:
        of_worker.pop(name, None)
    if not plan.worker.get("hash_seed"):  # masked, but there, when environment or file set one
        of_worker["HEADSTART_HASH_SEED"] = _secret()
    ports = free_ports(plan.num_workers)
    urls = [f"--worker=http://127.0.0.1:{port}" for port in ports]
    gateway = ChildSpec("gateway", (*python_command(), "gateway", *plan.gateway_flags, *urls),
                        {**shared, "HEADSTART_ADMIN_TOKEN": admin_token})
    workers = [ChildSpec(f"worker-{number}", (*python_command(), "worker", *plan.worker_flags, "--host=127.0.0.1",
                                              f"--port={port}", "--events-host=127.0.0.1", "--events-port=0",
                                              "--drain-delay-s=0"),  # by then the gateway has gone
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


def _parser() -> CommandParser:
    parser = CommandParser(PROG, summary="Run a gateway and its workers on this machine; Ctrl-C ends them all.\n"
                           "Every other flag of `headstart worker` is passed on to the workers.",
                           example="headstart up --workers 2 --model smollm2 --port 8000 --kv-memory 2GiB")
    parser.add_argument("--workers", dest="num_workers", metavar="N", default="2",
                        help="worker processes (default 2)")
    parser.add_argument("--gateway-config", metavar="FILE", help="the gateway's TOML file")
    parser.add_argument("--worker-config", metavar="FILE", help="the workers' TOML file")
    parser.add_argument("--print-config", action="store_true", help="show both outcomes, secrets masked, and stop")
    add_flags(parser, GatewayConfig, skip=_OURS)
    return parser


def _number_of_workers(text: str) -> tuple[int, list[str]]:
    if text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= WORKERS_MAX:
        return int(text), []
    return 1, [f"--workers: should be a number from 1 to {WORKERS_MAX}, got {text!r}"]


def _gateway_outcome(flags: Mapping[str, Any], file: Sequence[str], environ: Mapping[str, str],
                     problems: list[str]) -> GatewayConfig | None:
    path = file[0].partition("=")[2] if file else environ.get("HEADSTART_GATEWAY_CONFIG")
    try:
        return load_settings(GatewayConfig, flags=flags, environ=environ, env_prefix="HEADSTART_GATEWAY_",
                             toml_path=Path(path) if path else None)
    except SettingsError as error:
        problems += error.lines
        return None


def _worker_outcome(flags: Sequence[str], environ: Mapping[str, str], problems: list[str]) -> dict[str, Any] | None:
    done = subprocess.run([*python_command(), "worker", *flags, "--print-config"], env=dict(environ), text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, timeout=CHECK_TIMEOUT_S)
    if done.returncode == EXIT_OK:
        return tomllib.loads(done.stdout)
    problems += [line.removeprefix("headstart worker: ").replace(*_WHOSE_HELP) for line in done.stderr.splitlines()]
    return None


def _as_flags(given: Mapping[str, Any]) -> tuple[str, ...]:
    flags = {spec.name: spec.flag for spec in flag_specs(GatewayConfig)}
    return tuple(f"{flags[name]}={value}" for name, value in given.items())


def _secret() -> str:
    return secrets.token_hex(SECRET_BYTES)
