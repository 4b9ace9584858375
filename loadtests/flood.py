"""One tenant floods at 20 times its share: how much later does another's first token come?

    python -m loadtests.flood --json loadtests/results/flood-DATE.json

Two tenants of equal weight, one real worker on a seeded model with a core of its own, gateway and clients on the
other cores. (Two workers would share the cores of a small machine: each would be slower while the other is busy, and
that is not the gateway's doing.) Phases with and without the flood take turns. Arrivals are Poisson and do not wait
for answers; every prompt is new. The flood offers 20 times half of what the worker was measured to serve when it
never rests, heeds no Retry-After, and its requests are a quarter as long as the quiet tenant's: behind whom one waits
is what fairness is about, how long one such request takes is not.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from asyncio import gather
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import uvloop

from loadtests.bench.gateway_targets import cpu_ns
from loadtests.bench.relay_prompts import words
from loadtests.open_loop import Answered, OpenLoop
from loadtests.tenant_stack import MODEL, TenantStack, running_tenants

QUIET_CHARS, FLOOD_CHARS = 4000, 1000
HIDDEN, LAYERS = 128, 4
NUM_PLACES = 1  # more of them share a step, and a step takes as long as everything in it
QUIET_OF_SHARE, FLOOD_OF_SHARE = 0.5, 20.0
CALIBRATION, CALIBRATION_AT_ONCE = 48, 3
RATIO_MAX = 1.5


@dataclass
class Arm:
    """What one tenant got in phases of one kind."""

    answers: list[Answered] = field(default_factory=list)
    num_broken: int = 0

    def quantile(self, share: float) -> float:
        """Of the times to the first byte of an answer, which is a stream's first token."""
        times = sorted(answer.first_byte_s for answer in self.answers if answer.status == 200)
        return times[min(len(times) - 1, int(share * len(times)))]

    @property
    def statuses(self) -> dict[str, int]:
        """How often each came."""
        return {str(status): count for status, count in Counter(one.status for one in self.answers).items()}

    def summary(self) -> dict[str, object]:
        """As JSON."""
        return {"answers": self.statuses, "broken": self.num_broken, "ttft_p50_s": round(self.quantile(0.5), 4),
                "ttft_p90_s": round(self.quantile(0.9), 4), "ttft_p99_s": round(self.quantile(0.99), 4)}


def bodies(rng: random.Random, num_chars: int, count: int) -> list[bytes]:
    """Streamed completions of one token, every prompt new."""
    return [orjson.dumps({"model": MODEL, "prompt": words(rng, num_chars), "max_tokens": 1, "temperature": 0,
                          "ignore_eos": True, "stream": True}) for _ in range(count)]


class Flood:
    """The phases, and what came of them."""

    def __init__(self, stack: TenantStack, seed: int) -> None:
        self._stack = stack
        self._rng = random.Random(seed)
        self.alone, self.beside, self.flood = Arm(), Arm(), Arm()
        self.cpu_s: dict[str, float] = {}

    async def service_s(self, num_chars: int) -> float:
        """The seconds that one request of this size takes a worker that never rests."""
        async def some() -> None:
            for body in bodies(self._rng, num_chars, CALIBRATION // CALIBRATION_AT_ONCE):
                await self._loop("quiet").run([body], [0.0])

        await some()
        began_at = time.monotonic()
        await gather(*(some() for _ in range(CALIBRATION_AT_ONCE)))
        return (time.monotonic() - began_at) / CALIBRATION

    async def arrivals(self, tenant: str, arm: Arm, *, rate: float, seconds: float, num_chars: int) -> None:
        """Ask `rate` times a second for so long; return when the last has been answered."""
        gaps_s = [self._rng.expovariate(rate) for _ in range(round(rate * seconds))]
        driver = self._loop(tenant)
        await driver.run(bodies(self._rng, num_chars, len(gaps_s)), gaps_s)
        arm.answers += driver.answers
        arm.num_broken += driver.num_broken

    async def measure(self, *, phases: int, seconds: float) -> dict[str, object]:
        """Phases in turn; the two arms and what the flood got."""
        quiet_s, flood_s = [await self.service_s(size) for size in (QUIET_CHARS, FLOOD_CHARS)]
        quiet = {"rate": QUIET_OF_SHARE / quiet_s / 2, "seconds": seconds}
        flood = {"rate": FLOOD_OF_SHARE / flood_s / 2, "seconds": seconds}
        for phase in range(2 * phases):
            before = self._cpu_s()
            if is_flooded := bool(phase % 2):
                await gather(self.arrivals("quiet", self.beside, num_chars=QUIET_CHARS, **quiet),
                             self.arrivals("flood", self.flood, num_chars=FLOOD_CHARS, **flood))
            else:
                await self.arrivals("quiet", self.alone, num_chars=QUIET_CHARS, **quiet)
            for name, cpu_s in self._cpu_s().items():
                key = f"{name}_{'beside' if is_flooded else 'alone'}"
                self.cpu_s[key] = self.cpu_s.get(key, 0.0) + cpu_s - before[name]
            print(f"phase {phase + 1}/{2 * phases}: alone {self.alone.statuses}, beside {self.beside.statuses}, "
                  f"flood {self.flood.statuses}", file=sys.stderr, flush=True)
        return {"service_s": {"quiet": round(quiet_s, 4), "flood": round(flood_s, 4)},
                "offered_per_s": {"quiet": round(quiet["rate"], 2), "flood": round(flood["rate"], 2)},
                "alone": self.alone.summary(), "beside_the_flood": self.beside.summary(),
                "flood": self.flood.summary(), "cpu_s": {name: round(value, 2) for name, value in self.cpu_s.items()},
                "ttft_p50_ratio": round(self.beside.quantile(0.5) / self.alone.quantile(0.5), 3),
                "ttft_p99_ratio": round(self.beside.quantile(0.99) / self.alone.quantile(0.99), 3)}

    def _loop(self, tenant: str) -> OpenLoop:
        url = urlsplit(self._stack.url)
        return OpenLoop(url.port or 80, url.path, {"Authorization": f"Bearer {self._stack.keys[tenant]}"})

    def _cpu_s(self) -> dict[str, float]:
        pids = {"gateway": self._stack.gateway.process.pid, "worker": self._stack.workers[0].process.pid}
        return {name: cpu_ns(pid) / 1e9 for name, pid in pids.items()} | {"clients": time.process_time()}


def verdict(found: dict[str, object]) -> str:
    """In words."""
    ratio = float(str(found["ttft_p99_ratio"]))
    return (f"{'met' if ratio <= RATIO_MAX else 'NOT met'}: beside a flood of {FLOOD_OF_SHARE:g} times its share the "
            f"quiet tenant's p99 is {ratio:g} times its quiet value; the goal is {RATIO_MAX:g}")


def main() -> int:
    """Measure and print; 1 when the quiet tenant feels the flood too much."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.flood",
                                     description="What a flooding tenant does to another.",
                                     epilog="example: python -m loadtests.flood --phases 4 --seconds 13")
    parser.add_argument("--phases", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=13.0, help="of each phase")
    parser.add_argument("--places", type=int, default=NUM_PLACES, help="requests under way at the worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    with running_tenants(("quiet", "flood"), hidden=HIDDEN, layers=LAYERS, num_workers=1, core_apart=True,
                         arguments=[f"--max-inflight-per-worker={arguments.places}",
                                    "--max-queued-requests=200"]) as stack:
        found = uvloop.run(Flood(stack, arguments.seed).measure(phases=arguments.phases, seconds=arguments.seconds))
    commit = subprocess.run(["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"],
                            cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    words_of_it = verdict(found)
    text = orjson.dumps({"date": time.strftime("%Y-%m-%d"), "commit": commit, "seed": arguments.seed,
                         "machine": f"{os.cpu_count()} cores", "load_average": os.getloadavg(),
                         "model": f"Llama, {LAYERS} layers, {HIDDEN} wide", "places": arguments.places, **found,
                         "verdict": words_of_it}, option=orjson.OPT_INDENT_2).decode() + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text)
    print(text + words_of_it)
    return 1 if "NOT" in words_of_it else 0


if __name__ == "__main__":
    sys.exit(main())
