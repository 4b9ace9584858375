"""CPU a request of a gateway with one process and with several, interleaved: what does being together cost?

    python -m loadtests.bench.processes
    python -m loadtests.bench.processes --processes 4 --json result.json

Three arms in front of the same workers, each the gateway with everything on (gateway_targets.py: a key, three
limits, prefix routing, metrics, log lines), on the 1 KB chats of the relay benchmark: one process; N processes of one
gateway; and, as the control, N gateways of one process each, which share nothing. All have 64 connections together.
What the control costs beyond one process is the machine's (cache, fewer events a turn of each loop) and the events,
which every process reads for itself; what N processes cost beyond the control is theirs. `warm` repeats prompts, so
there are no events; `new` ends each prompt with 256 bytes that nobody sent before. CPU is user and system time of all
processes of an arm, its supervisor included, on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from loadtests.bench.gateway_targets import Bench, Peers, Target, cpu_ns, memory_kib
from loadtests.bench.relay_client import Load, run_load
from loadtests.bench.relay_prompts import SHORT, bodies

NUM_WORKERS = 4
CONNECTIONS = 64
WARM_SEED = 1


@dataclass
class Arm:
    """One way to serve the same clients, and microseconds of CPU a request, by kind of prompt and round."""

    name: str
    targets: list[Target]
    request_us: dict[str, list[float]] = field(default_factory=dict)

    def cpu_ns(self) -> int:
        """Of all its processes so far."""
        return sum(cpu_ns(target.pid) for target in self.targets)

    async def send(self, prompts: list[bytes]) -> None:
        """All prompts, over all connections, evenly over the targets."""
        number = len(self.targets)
        await asyncio.gather(*(run_load(Load(target.port, prompts[place::number], CONNECTIONS // number,
                                             key=target.key)) for place, target in enumerate(self.targets)))


def measure(arms: list[Arm], rounds: int, requests: int) -> None:
    """Fill in the arms' figures: every round goes over all, beginning with another each time; one is thrown away."""
    seed = WARM_SEED
    for number in range(rounds + 1):
        for arm in arms[number % len(arms):] + arms[:number % len(arms)]:
            seed += 1
            for kind, prompts in (("warm", bodies(SHORT, requests, seed=WARM_SEED)),
                                  ("new", bodies(SHORT, requests, seed=seed))):
                before = arm.cpu_ns()
                uvloop.run(arm.send(prompts))
                if number:
                    arm.request_us.setdefault(kind, []).append((arm.cpu_ns() - before) / requests / 1000)


def summary(arms: list[Arm]) -> list[dict[str, object]]:
    """Medians, and the last arm against each other, round by round."""
    rows = []
    for arm in arms:
        row: dict[str, object] = {"arm": arm.name, "commit": arm.targets[0].version, "rounds": arm.request_us}
        for kind, values in arm.request_us.items():
            shares = [mine / theirs for mine, theirs in zip(arms[-1].request_us[kind], values, strict=True)]
            row[f"{kind}_us"] = round(statistics.median(values), 1)
            row[f"{kind}_together_against_it"] = round(statistics.median(shares), 3)
        row["memory_mib"] = sum(memory_kib(target.pid) for target in arm.targets) // 1024
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.processes",
                                     description="CPU a request of one gateway process and of several.",
                                     epilog="example: python -m loadtests.bench.processes --processes 2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=2000, help="requests a round, arm and kind of prompt")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    number = arguments.processes
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), Peers(), num_workers=NUM_WORKERS) as bench:
        arms = [Arm("1 process", [bench.start_processes(1)]),
                Arm(f"{number} gateways apart", [bench.start_processes(1) for _ in range(number)]),
                Arm(f"{number} processes together", [bench.start_processes(number)])]
        measure(arms, arguments.rounds, arguments.requests)
        rows = summary(arms)
    for row in rows:
        figures = "   ".join(f"{kind} {row[f'{kind}_us']:>8} us ({row[f'{kind}_together_against_it']})"
                             for kind in ("warm", "new"))
        print(f"{row['arm']:<24}{figures}   {row['memory_mib']} MiB")
    if arguments.json:
        result = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(),
                  "requests": arguments.requests, "connections": CONNECTIONS, "arms": rows}
        Path(arguments.json).write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
