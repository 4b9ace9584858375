"""What a request and a streamed chunk cost in the gateway's process: this tree against others, interleaved.

    python -m loadtests.bench.relay
    python -m loadtests.bench.relay --against HEAD~1 --against main --json

One gateway a tree, started once, in front of one worker that computes nothing (relay_worker.py), or of several in one
process; rounds go over the arms in turn. CPU is user and system time of the gateway's threads, in nanoseconds from
the kernel; `direct` sends the same requests to the worker and shows its CPU: what moves there is the machine. A tree
named by --against is checked out into a temporary git worktree, so that any two states of the data path can be
compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import uvloop

from loadtests.bench.gateway_targets import cpu_ns
from loadtests.bench.relay_client import Load, run_load
from loadtests.bench.relay_prompts import LONG, SEED, SHORT, bodies
from loadtests.bench.relay_worker import NUM_CHUNKS
from loadtests.local_stack import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
LONG_SHARE = 4  # so many chats of 1 KB to one of 32 KB
RATIOS = ("request_us_ratio", "long_us_ratio", "chunk_us_ratio", "p50_us_ratio")
FIGURES = ("request_us", "long_us", "chunk_us", "p50_us")


@dataclass
class Arm:
    """One way to the worker: whose CPU is measured, where requests go, and what was found."""

    name: str
    commit: str
    pid: int
    port: int
    request_us: list[float] = field(default_factory=list)
    long_us: list[float] = field(default_factory=list)
    chunk_us: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    """How much of each is sent a round."""

    rounds: int
    requests: int
    connections: int
    streams: int


def measure(arms: list[Arm], sizes: Sizes, first_seed: int = 1000) -> None:
    """Fill in the arms' figures: every round goes over all of them, beginning with another each time.

    What is new in a prompt depends on the seed, and each round and arm has its own: nothing is ever sent twice.
    """
    for number in range(sizes.rounds):
        for at, arm in enumerate(arms[number % len(arms):] + arms[:number % len(arms)]):
            seed = first_seed + number * len(arms) + at
            whole = Load(arm.port, bodies(SHORT, sizes.requests, seed=seed), sizes.connections)
            before = cpu_ns(arm.pid)
            latencies = uvloop.run(run_load(whole))
            arm.request_us.append((cpu_ns(arm.pid) - before) / sizes.requests / 1000)
            arm.p50_us.append(statistics.median(latencies) * 1e6)
            long = Load(arm.port, bodies(LONG, max(1, sizes.requests // LONG_SHARE), seed=seed), sizes.connections)
            before = cpu_ns(arm.pid)
            uvloop.run(run_load(long))
            arm.long_us.append((cpu_ns(arm.pid) - before) / len(long.bodies) / 1000)
            asked = bodies(SHORT, sizes.streams, stream=True, seed=seed)
            streams = Load(arm.port, asked, sizes.streams, spread_s=0.5)
            before = cpu_ns(arm.pid)
            uvloop.run(run_load(streams))
            arm.chunk_us.append((cpu_ns(arm.pid) - before) / (sizes.streams * (NUM_CHUNKS + 1)) / 1000)


# ---- processes ---------------------------------------------------------------------------------------------------


def _environment(tree: Path, token: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "HEADSTART_WORKER_TOKEN": token, "HEADSTART_ADMIN_TOKEN": token}


@contextlib.contextmanager
def _process(tree: Path, arguments: list[str], token: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=tree, env=_environment(tree, token),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _each(flag: str, values: Iterable[object]) -> list[str]:
    return [word for value in values for word in (flag, str(value))]


def _until(url: str, sign: bytes, token: str, times: int = 1) -> None:
    deadline = time.monotonic() + START_S
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            if answer.read().count(sign) >= times:
                return
        time.sleep(0.1)
    raise SystemExit(f"{url} never said {sign.decode()}")


@contextlib.contextmanager
def _tree(ref: str | None) -> Iterator[Path]:
    if ref is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", tree, ref], cwd=ROOT, check=True, capture_output=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True, capture_output=True)


def _commit(ref: str) -> str:
    found = subprocess.run(["git", "describe", "--always", "--exclude=*", "--abbrev=10", ref if ref != "HEAD" else
                            "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.strip()


@contextlib.contextmanager
def running_arms(refs: list[str], num_workers: int = 1) -> Iterator[list[Arm]]:
    """The workers, this tree's gateway and one for each of `refs`, all knowing the workers."""
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(num_workers)]
        workers = [f"http://127.0.0.1:{port}" for port in ports]
        pid = stack.enter_context(_process(ROOT, ["loadtests.bench.relay_worker", *_each("--port", ports)], token))
        for worker in workers:
            _until(f"{worker}/kv", b"bench", token)
        arms = [Arm("direct", "", pid, ports[0])]
        for ref in [None, *refs]:
            port, tree = free_port(), stack.enter_context(_tree(ref))
            pid = stack.enter_context(_process(
                tree, ["gateway.cli", "gateway", "--port", str(port), *_each("--worker", workers)], token))
            _until(f"http://127.0.0.1:{port}/admin/workers", b'"knowledge":"exact"', token, num_workers)
            arms.append(Arm("this tree" if ref is None else ref, _commit(ref or "HEAD"), pid, port))
        yield arms


# ---- report ------------------------------------------------------------------------------------------------------


def summary(arms: list[Arm]) -> dict[str, object]:
    """Medians, and this tree's share of each other's, round by round."""
    ours = next(arm for arm in arms if arm.name == "this tree")
    rows = []
    for arm in arms:
        row: dict[str, object] = {"arm": arm.name, "commit": arm.commit}
        for figure in FIGURES:
            values: list[float] = getattr(arm, figure)
            row[figure] = round(statistics.median(values), 2)
            row[f"{figure}_min"] = round(min(values), 2)
            if arm is not ours and arm.name != "direct":
                shares = [mine / theirs for mine, theirs in zip(getattr(ours, figure), values, strict=True)]
                row[f"{figure}_ratio"] = round(statistics.median(shares), 3)
        rows.append(row)
    return {"arms": rows, "seed": SEED, "rounds": [asdict(arm) for arm in arms]}


def _print_table(arms: list[Arm]) -> None:
    rows: list[dict[str, object]] = summary(arms)["arms"]  # type: ignore[assignment]
    print(f"{'arm':<24}{'commit':<20}{'us/request':>12}{'32 KB':>10}{'us/chunk':>12}{'p50 us':>12}   this tree / it")
    for row in rows:
        shares = ", ".join(f"{row[key]:.3f}" for key in RATIOS if key in row)
        print(f"{row['arm']:<24}{row['commit']:<20}{row['request_us']:>12}{row['long_us']:>10}{row['chunk_us']:>12}"
              f"{row['p50_us']:>12}   {shares}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.relay",
                                     description="CPU of the gateway per request and per streamed chunk.",
                                     epilog="example: python -m loadtests.bench.relay --against HEAD~1")
    parser.add_argument("--against", action="append", default=[], metavar="REF", help="another commit, interleaved")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000, help="requests a round and arm")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="workers behind each gateway, in one process")
    parser.add_argument("--streams", type=int, default=60, help="streams open at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.rounds, arguments.requests, arguments.connections, arguments.streams)
    with running_arms(arguments.against, arguments.workers) as arms:
        measure(arms, Sizes(1, 500, sizes.connections, 10), first_seed=0)  # warm-up, thrown away
        for arm in arms:
            arm.request_us, arm.long_us, arm.chunk_us, arm.p50_us = [], [], [], []
        measure(arms, sizes)
    if arguments.json:
        print(orjson.dumps({"sizes": asdict(sizes), "workers": arguments.workers,
                            "date": time.strftime("%Y-%m-%d"), **summary(arms)},
                           option=orjson.OPT_INDENT_2).decode())
    else:
        _print_table(arms)


if __name__ == "__main__":
    main()
