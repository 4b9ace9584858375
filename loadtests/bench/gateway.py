"""Our gateway with everything on, beside other people's gateways, interleaved: CPU, latency and memory.

    python -m loadtests.bench.gateway
    python -m loadtests.bench.gateway --only nginx --rounds 1 --json result.json

Every round goes over all targets, beginning with another each time; direct, without a gateway, is one of them.
CPU is user and system time of the target's processes from the kernel. Latencies are less direct's of the same round.
No prompt is ever sent twice: what is warm is its beginning (relay_prompts.py). Ours checks a key and three limits,
tokenises, hashes, matches against what four workers announced, writes metrics and a log line. Peers are the programs
found on PATH or named by a flag; one that is not there is left out and the result says why.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import orjson
import uvloop

from loadtests.bench.gateway_targets import (
    CAPPED,
    DIRECT,
    OURS,
    Bench,
    Peers,
    Target,
    cpu_ns,
    interpreter,
    memory_kib,
)
from loadtests.bench.relay_client import Load, run_load
from loadtests.bench.relay_prompts import DISTINCT, LONG, SHORT, Shape, bodies
from loadtests.bench.relay_worker import NUM_CHUNKS

NAMES = (OURS, "nginx", "sglang-router", "vllm-router", "aiohttp", "bare relay")
NUM_WORKERS = 4
CONNECTIONS = 64
STREAMS = 60
MEMORY_CONNECTIONS = 16
MEMORY_BATCH = 1000
WARM_UP_REQUESTS = 256
PAUSE_S = 0.001
# Workers go on announcing the blocks of long chats for a while, and their event loops with it.
SETTLE_S = 1.0
FIGURES = {"short_us": "1 KB, us/request", "long_us": "32 KB, us/request", "p50_us": "added p50, us",
           "p99_us": "added p99, us", "chunk_us": "us/chunk", "kib_per_prompt": "KiB/prompt",
           "kib_per_prompt_later": "of the second half"}


class Seeds:
    """A new seed each time, so that no two batches of prompts share what is new in them."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """The next one."""
        self._last += 1
        return self._last


def request_cpu(target: Target, shape: Shape, count: int, seeds: Seeds) -> float:
    """Microseconds of CPU a request of this shape."""
    load = Load(target.port, bodies(shape, count, seed=seeds.next()), CONNECTIONS, key=target.key)
    before = cpu_ns(target.pid)
    uvloop.run(run_load(load))
    return (cpu_ns(target.pid) - before) / count / 1000


def chunk_cpu(target: Target, seeds: Seeds) -> float:
    """Microseconds of CPU a chunk, of streams that are open side by side."""
    load = Load(target.port, bodies(SHORT, STREAMS, stream=True, seed=seeds.next()), STREAMS, spread_s=1.0,
                key=target.key)
    before = cpu_ns(target.pid)
    uvloop.run(run_load(load))
    return (cpu_ns(target.pid) - before) / (STREAMS * (NUM_CHUNKS + 1)) / 1000


def latency(target: Target, count: int, seeds: Seeds) -> tuple[float, float]:
    """p50 and p99 in microseconds, one request at a time, once what went before has been dealt with."""
    time.sleep(SETTLE_S)
    load = Load(target.port, bodies(SHORT, count, seed=seeds.next()), 1, pause_s=PAUSE_S, key=target.key)
    found = sorted(uvloop.run(run_load(load)))
    return found[len(found) // 2] * 1e6, found[len(found) * 99 // 100] * 1e6


def measure_round(targets: list[Target], requests: int, seeds: Seeds) -> None:
    """One round of everything but memory."""
    for target in targets:
        target.note("short_us", request_cpu(target, SHORT, requests, seeds))
        target.note("long_us", request_cpu(target, LONG, requests // 3, seeds))
        p50, p99 = latency(target, requests // 4, seeds)
        target.note("p50_us", p50)
        target.note("p99_us", p99)
        target.note("chunk_us", chunk_cpu(target, seeds))


def measure_memory(target: Target, prompts: int, seeds: Seeds) -> None:
    """KiB a distinct prompt left behind in memory, and of the second half of them alone."""
    def send(count: int) -> None:
        for start in range(0, count, MEMORY_BATCH):
            batch = bodies(DISTINCT, min(MEMORY_BATCH, count - start), seed=seeds.next())
            uvloop.run(run_load(Load(target.port, batch, MEMORY_CONNECTIONS, key=target.key)))

    send(200)
    idle = memory_kib(target.pid)
    send(prompts // 2)
    half = memory_kib(target.pid)
    send(prompts - prompts // 2)
    after = memory_kib(target.pid)
    target.note("kib_per_prompt", (after - idle) / prompts)
    target.note("kib_per_prompt_later", (after - half) / (prompts - prompts // 2))


def warmth(target: Target) -> dict[str, float]:
    """What our gateway itself counted: the predicted share of prompt tokens in caches, and events it missed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{target.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str, label: str = "") -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)

    prompt_tokens = total("headstart_prompt_tokens_total")
    predicted = total("headstart_cached_tokens_total", 'source="predicted"')
    return {"predicted_hit_ratio": round(predicted / prompt_tokens, 3) if prompt_tokens else 0.0,
            "event_gaps": total("headstart_event_gaps_total"), "index_blocks": total("headstart_index_blocks")}


def summary(targets: list[Target]) -> list[dict[str, object]]:
    """A row a target: medians over the rounds; latencies less direct's of the same round."""
    direct = next(target for target in targets if target.name == DIRECT)
    rows = []
    for target in targets:
        row: dict[str, object] = {"target": target.name, "version": target.version}
        for figure, values in target.figures.items():
            shown = values
            if target is not direct and figure in ("p50_us", "p99_us"):
                shown = [mine - without for mine, without in zip(values, direct.figures[figure], strict=True)]
            row[figure] = round(statistics.median(shown), 2)
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, object]], skipped: dict[str, str]) -> None:
    """The rows as Markdown."""
    print("| | " + " | ".join(FIGURES.values()) + " |\n|---" * 1 + "|---" * len(FIGURES) + "|")
    for row in rows:
        name = f"{row['target']} {row['version']}".strip()
        print(f"| {name} | " + " | ".join(str(row.get(figure, "-")) for figure in FIGURES) + " |")
    for name, reason in skipped.items():
        print(f"\n{name} was left out: {reason}")


def run(arguments: argparse.Namespace, bench: Bench) -> dict[str, object]:
    """Measure everything; the result."""
    skipped: dict[str, str] = {}
    targets, seeds, began_at = [bench.direct()], Seeds(), time.time()
    names = [name for name in NAMES if not arguments.only or name in (OURS, *arguments.only)]
    for name in names:
        found = bench.start(name)
        if isinstance(found, str):
            skipped[name] = found
        else:
            targets.append(found)
    for target in targets:  # what is shared gets warm, and every code path has run
        for shape in (SHORT, LONG):
            request_cpu(target, shape, min(WARM_UP_REQUESTS, arguments.requests), seeds)
    for number in range(arguments.rounds):
        at = number % len(targets)
        measure_round(targets[at:] + targets[:at], arguments.requests, seeds)
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    counted = {target.name: warmth(target) for target in targets if target.name == OURS}
    if arguments.prompts:
        skipped |= _memory_of_all(bench, targets, arguments.prompts, seeds)
    return {"date": time.strftime("%Y-%m-%d", time.gmtime(began_at)), "machine": _machine(),
            "took_s": round(time.time() - began_at), "workers": NUM_WORKERS,
            "load_average": [round(value, 1) for value in os.getloadavg()], "python": interpreter(bench.peers.python),
            "sizes": {name: getattr(arguments, name) for name in ("rounds", "requests", "prompts")},
            "skipped": skipped, "counted": counted, "rows": summary(targets),
            "rounds": {target.name: target.figures for target in targets}}


def _memory_of_all(bench: Bench, targets: list[Target], prompts: int, seeds: Seeds) -> dict[str, str]:
    """Each in a process of its own that has seen nothing before; who did not start, and why."""
    skipped = {}
    for target in targets:
        if target.name != DIRECT:
            bench.stop(target)
    for name in [*(target.name for target in targets if target.name != DIRECT), CAPPED]:
        fresh = bench.start(name)
        if isinstance(fresh, str):
            skipped[f"{name}, memory"] = fresh
            continue
        measure_memory(fresh, prompts, seeds)
        bench.stop(fresh)
        known = next((target for target in targets if target.name == name), None)
        if known is None:
            targets.append(fresh)
        else:
            known.figures |= fresh.figures
    return skipped


def _machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} x {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} x {platform.machine()}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench.gateway",
        description="Our gateway beside nginx, sglang-router, vllm-router, a plain aiohttp proxy and a bare relay.",
        epilog="example: python -m loadtests.bench.gateway --sglang-router ~/peers/bin/sglang-router")
    parser.add_argument("--nginx", default="nginx", help="the program, by path or name on PATH")
    parser.add_argument("--sglang-router", default="sglang-router")
    parser.add_argument("--vllm-router", default="vllm-router")
    parser.add_argument("--python", default=sys.executable,
                        help="the interpreter of ours and of Python's proxies; it needs the packages that we need")
    parser.add_argument("--only", action="append", default=[], choices=NAMES, help="beside ours; all without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2400, help="1 KB requests a round and target")
    parser.add_argument("--prompts", type=int, default=20_000, help="distinct 8 KB prompts for memory; 0: none")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    peers = Peers(arguments.nginx, arguments.sglang_router, arguments.vllm_router, arguments.python)
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), peers, num_workers=NUM_WORKERS) as bench:
        result = run(arguments, bench)
    print(f"Python {result['python']}\n")
    print_table(result["rows"], result["skipped"])  # type: ignore[arg-type]
    if arguments.json is not None:
        arguments.json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
