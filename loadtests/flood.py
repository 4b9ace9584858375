"""One tenant floods at 20 times its share: how much later does another's first token come?

    python -m loadtests.flood --json loadtests/results/flood-DATE.json

Two tenants of equal weight, one real worker on a seeded model, one request at a time, so that who waits, waits in the
gateway. (Two workers would share the cores of a small machine: each would be slower while the other is busy, and that
is not the gateway's doing.) Phases with and without the flood take turns. Arrivals are Poisson and do not wait for
answers; every prompt is new. The flood offers 20 times half of what the worker was measured to serve when it never
rests, in requests a quarter as long as the quiet tenant's: behind whom one waits is what fairness is about, how long
one such request takes is not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson

from loadtests.bench.relay_prompts import words
from loadtests.tenant_stack import TenantStack, ask, running_tenants

QUIET_CHARS, FLOOD_CHARS = 4000, 1000
HIDDEN, LAYERS = 128, 4
NUM_WORKERS = 1
QUIET_OF_SHARE, FLOOD_OF_SHARE = 0.5, 20.0
CALIBRATION, CALIBRATION_AT_ONCE = 24, 3
RATIO_MAX = 1.5


@dataclass
class Arm:
    """The quiet tenant's times in phases of one kind."""

    ttft_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def quantile(self, share: float) -> float:
        """Of the times."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]

    def summary(self) -> dict[str, object]:
        """As JSON."""
        return {"requests": len(self.ttft_s), "refused": self.statuses.total() - self.statuses[200],
                "ttft_p50_s": round(self.quantile(0.5), 4), "ttft_p90_s": round(self.quantile(0.9), 4),
                "ttft_p99_s": round(self.quantile(0.99), 4)}


async def service_s(session: aiohttp.ClientSession, stack: TenantStack, num_chars: int, rng: random.Random) -> float:
    """The seconds that one request of this size takes a worker that never rests."""
    async def some() -> None:
        for _ in range(CALIBRATION // CALIBRATION_AT_ONCE):
            await ask(session, stack, "quiet", words(rng, num_chars))

    await some()
    began_at = time.monotonic()
    await asyncio.gather(*(some() for _ in range(CALIBRATION_AT_ONCE)))
    return (time.monotonic() - began_at) / CALIBRATION


async def arrivals(session: aiohttp.ClientSession, stack: TenantStack, tenant: str, *, rate: float, seconds: float,
                   num_chars: int, arm: Arm, rng: random.Random) -> None:
    """Ask `rate` times a second for so long; return when the last has been answered."""
    ends_at, running = time.monotonic() + seconds, set[asyncio.Task[None]]()

    async def one(prompt: str) -> None:
        found = await ask(session, stack, tenant, prompt)
        arm.statuses[found.status] += 1
        if found.ttft_s is not None:
            arm.ttft_s.append(found.ttft_s)

    next_at = time.monotonic() + rng.expovariate(rate)
    while next_at < ends_at:
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        task = asyncio.create_task(one(words(rng, num_chars)))
        running.add(task)
        task.add_done_callback(running.discard)
        next_at += rng.expovariate(rate)
    await asyncio.gather(*running)


async def measure(stack: TenantStack, *, phases: int, seconds: float, seed: int) -> dict[str, object]:
    """Phases in turn; the two arms and what the flood got."""
    rng = random.Random(seed)
    alone, beside, flood = Arm(), Arm(), Arm()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300), connector=connector) as session:
        quiet_s, flood_s = [await service_s(session, stack, size, rng) for size in (QUIET_CHARS, FLOOD_CHARS)]
        quiet_rate = QUIET_OF_SHARE * NUM_WORKERS / quiet_s / 2
        flood_rate = FLOOD_OF_SHARE * NUM_WORKERS / flood_s / 2
        for phase in range(2 * phases):
            is_flooded = bool(phase % 2)
            tasks = [arrivals(session, stack, "quiet", rate=quiet_rate, seconds=seconds, num_chars=QUIET_CHARS,
                              arm=beside if is_flooded else alone, rng=rng)]
            if is_flooded:
                tasks.append(arrivals(session, stack, "flood", rate=flood_rate, seconds=seconds,
                                      num_chars=FLOOD_CHARS, arm=flood, rng=rng))
            await asyncio.gather(*tasks)
            print(f"phase {phase + 1}/{2 * phases}: alone {len(alone.ttft_s)}, beside {len(beside.ttft_s)} answers, "
                  f"flood {dict(flood.statuses)}", file=sys.stderr, flush=True)
    ratio = beside.quantile(0.99) / alone.quantile(0.99)
    return {"service_s": {"quiet": round(quiet_s, 4), "flood": round(flood_s, 4)},
            "offered_per_s": {"quiet": round(quiet_rate, 2), "flood": round(flood_rate, 2)},
            "alone": alone.summary(), "beside_the_flood": beside.summary(),
            "flood": {str(status): count for status, count in flood.statuses.items()},
            "ttft_p99_ratio": round(ratio, 3),
            "ttft_p50_ratio": round(beside.quantile(0.5) / alone.quantile(0.5), 3)}


def main() -> int:
    """Measure and print; 1 when the quiet tenant feels the flood too much."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.flood",
                                     description="What a flooding tenant does to another.",
                                     epilog="example: python -m loadtests.flood --phases 4 --seconds 30")
    parser.add_argument("--phases", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    with running_tenants(("quiet", "flood"), hidden=HIDDEN, layers=LAYERS, num_workers=NUM_WORKERS,
                         arguments=["--max-inflight-per-worker=1", "--max-queued-requests=200"]) as stack:
        found = asyncio.run(measure(stack, phases=arguments.phases, seconds=arguments.seconds, seed=arguments.seed))
    commit = subprocess.run(["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"],
                            cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    is_ok = float(str(found["ttft_p99_ratio"])) <= RATIO_MAX
    text = orjson.dumps({"date": time.strftime("%Y-%m-%d"), "commit": commit, "seed": arguments.seed,
                         "machine": f"{os.cpu_count()} cores", "load_average": os.getloadavg(),
                         "model": f"Llama, {LAYERS} layers, {HIDDEN} wide", **found, "ok": is_ok},
                        option=orjson.OPT_INDENT_2).decode() + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text)
    print(text, end="")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
