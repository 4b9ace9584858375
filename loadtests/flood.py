"""One tenant floods at 20 times its share: how much later does another's first token come?

    python -m loadtests.flood --json loadtests/results/flood-DATE.json

Two tenants of equal weight, one real worker on a seeded model with a core of its own, gateway and clients on the
other cores. (Two workers would share the cores of a small machine: each would be slower while the other is busy, and
that is not the gateway's doing.) Arrivals are Poisson and do not wait for answers; every prompt is new. The flood
offers 20 times half of what the worker was measured to serve when it never rests, heeds no Retry-After, and its
requests are a quarter as long as the quiet tenant's: behind whom one waits is what fairness is about, how long one
such request takes is not.

Each round has three phases: without the flood, beside it, and without it again, in another order each time. The quiet
tenant's requests come at the same instants in all three. What lies between the two without a flood is the machine's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from asyncio import gather
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import uvloop

from loadtests.bench.gateway_targets import cpu_ns
from loadtests.bench.relay_prompts import words
from loadtests.flood_arms import Arm, Ratio, ratio
from loadtests.open_loop import OpenLoop
from loadtests.provenance import provenance
from loadtests.tenant_stack import MODEL, TenantStack, running_tenants
from worker.protocol.collector import collect_seldom

QUIET_CHARS, FLOOD_CHARS = 4000, 1000
HIDDEN, LAYERS = 128, 4
NUM_PLACES = 1  # more of them share a step, and a step takes as long as everything in it
QUIET_OF_SHARE, FLOOD_OF_SHARE = 0.5, 20.0
CALIBRATION, CALIBRATION_AT_ONCE = 48, 3
RATIO_MAX = 1.5


def bodies(rng: random.Random, num_chars: int, count: int) -> list[bytes]:
    """Streamed completions of one token, every prompt new."""
    return [orjson.dumps({"model": MODEL, "prompt": words(rng, num_chars), "max_tokens": 1, "temperature": 0,
                          "ignore_eos": True, "stream": True}) for _ in range(count)]


class Flood:
    """The rounds, and what came of them. `alone`, `beside` and `again` are the quiet tenant's."""

    def __init__(self, stack: TenantStack, seed: int) -> None:
        self._stack = stack
        self._rng = random.Random(seed)
        self._seed = seed
        self.alone, self.beside, self.again, self.flood = Arm(), Arm(), Arm(), Arm()
        self.cpu_s = {True: dict[str, float](), False: dict[str, float]()}

    async def service_s(self, num_chars: int) -> float:
        """The seconds that one request of this size takes a worker that never rests."""
        async def some() -> None:
            for body in bodies(self._rng, num_chars, CALIBRATION // CALIBRATION_AT_ONCE):
                await self._loop("quiet").run([body], [0.0])

        await some()
        began_at = time.monotonic()
        await gather(*(some() for _ in range(CALIBRATION_AT_ONCE)))
        return (time.monotonic() - began_at) / CALIBRATION

    async def measure(self, *, rounds: int, seconds: float) -> dict[str, object]:
        """All rounds; the arms side by side, and what the flood got."""
        collect_seldom()  # a pause of this process would look like a late token
        quiet_s, flood_s = [await self.service_s(size) for size in (QUIET_CHARS, FLOOD_CHARS)]
        quiet_rate, flood_rate = QUIET_OF_SHARE / quiet_s / 2, FLOOD_OF_SHARE / flood_s / 2
        for number in range(rounds):
            quiet_gaps_s, flood_gaps_s = self._gaps_s(quiet_rate, seconds), self._gaps_s(flood_rate, seconds)
            arms = [self.alone, self.beside, self.again]
            for arm in arms[number % 3:] + arms[:number % 3]:
                await self._phase(number, arm, quiet_gaps_s, flood_gaps_s if arm is self.beside else [])
            print(f"round {number + 1}/{rounds}: {len(self.beside.ttfts_s)} answers beside the flood, "
                  f"flood {dict(self.flood.statuses)}", file=sys.stderr, flush=True)
        return {"rounds": rounds, "seconds": seconds,
                "service_s": {"quiet": round(quiet_s, 4), "flood": round(flood_s, 4)},
                "offered_per_s": {"quiet": round(quiet_rate, 2), "flood": round(flood_rate, 2)},
                "alone": self.alone.summary(), "again": self.again.summary(),
                "beside_the_flood": self.beside.summary(), "flood": self.flood.summary(),
                "cpu_s": {"alone": self.cpu_s[False], "beside": self.cpu_s[True]}}

    def ratios(self, share: float) -> tuple[Ratio, Ratio]:
        """This quantile beside the flood over that without it; and, without it, of the one half over the other."""
        return (ratio(self.beside, [self.alone, self.again], share, seed=self._seed),
                ratio(self.again, [self.alone], share, seed=self._seed))

    async def _phase(self, number: int, arm: Arm, quiet_gaps_s: list[float], flood_gaps_s: list[float]) -> None:
        """Both tenants' requests from the same instant on, until the last has been answered."""
        quiet, flood = self._loop("quiet"), self._loop("flood")
        quiet_bodies = bodies(self._rng, QUIET_CHARS, len(quiet_gaps_s))
        flood_bodies = bodies(self._rng, FLOOD_CHARS, len(flood_gaps_s))
        before = self._cpu_s()
        await gather(quiet.run(quiet_bodies, quiet_gaps_s), flood.run(flood_bodies, flood_gaps_s))
        spent = self.cpu_s[arm is self.beside]
        for name, cpu_s in self._cpu_s().items():
            spent[name] = round(spent.get(name, 0.0) + cpu_s - before[name], 2)
        arm.add(number, quiet.answers, num_broken=quiet.num_broken)
        self.flood.add(number, flood.answers, num_broken=flood.num_broken)

    def _gaps_s(self, rate: float, seconds: float) -> list[float]:
        return [self._rng.expovariate(rate) for _ in range(round(rate * seconds))]

    def _loop(self, tenant: str) -> OpenLoop:
        url = urlsplit(self._stack.url)
        return OpenLoop(url.port or 80, url.path, {"Authorization": f"Bearer {self._stack.keys[tenant]}"})

    def _cpu_s(self) -> dict[str, float]:
        pids = {"gateway": self._stack.gateway.process.pid, "worker": self._stack.workers[0].process.pid}
        return {name: cpu_ns(pid) / 1e9 for name, pid in pids.items()} | {"clients": time.process_time()}


def judged(flood: Flood) -> tuple[bool, dict[str, object], list[str]]:
    """Whether the goal is met, and why: as JSON and in words."""
    (p50, p50_control), (p99, p99_control) = flood.ratios(0.5), flood.ratios(0.99)
    quiet = [flood.alone, flood.beside, flood.again]
    all_served = all(set(arm.statuses) == {"200"} and not arm.num_broken for arm in quiet)
    is_met = p99.value <= RATIO_MAX and all_served
    shares = {"ttft_p50": p50, "ttft_p50_control": p50_control, "ttft_p99": p99, "ttft_p99_control": p99_control}
    told = [f"quiet tenant beside the flood over without it, {len(flood.beside.ttfts_s)} requests (95 % of draws):",
            f"  p50 {p50}, p99 {p99}", f"  control, without a flood twice: p50 {p50_control}, p99 {p99_control}"]
    if not all_served:
        told.append("  some of its requests were refused or broke off")
    told.append(f"{'met' if is_met else 'NOT met'}: beside a flood of {FLOOD_OF_SHARE:g} times its share the quiet "
                f"tenant's p99 is {p99.value:.2f} times its quiet value; the goal is {RATIO_MAX:g}")
    return is_met, {name: value.summary() for name, value in shares.items()} | {"verdict": told[-1]}, told


def main() -> int:
    """Measure and print; 1 when the quiet tenant feels the flood too much."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.flood",
                                     description="What a flooding tenant does to another.",
                                     epilog="example: python -m loadtests.flood --rounds 3 --seconds 13")
    parser.add_argument("--rounds", type=int, default=7, help="of three phases")
    parser.add_argument("--seconds", type=float, default=13.0, help="of each phase")
    parser.add_argument("--places", type=int, default=NUM_PLACES, help="requests under way at the worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    with running_tenants(("quiet", "flood"), hidden=HIDDEN, layers=LAYERS, num_workers=1, core_apart=True,
                         arguments=[f"--max-inflight-per-worker={arguments.places}",
                                    "--max-queued-requests=200"]) as stack:
        flood = Flood(stack, arguments.seed)
        found = uvloop.run(flood.measure(rounds=arguments.rounds, seconds=arguments.seconds))
    is_met, figures, told = judged(flood)
    text = orjson.dumps({**provenance(), "seed": arguments.seed, "model": f"Llama, {LAYERS} layers, {HIDDEN} wide",
                         "places": arguments.places, **found, **figures}, option=orjson.OPT_INDENT_2).decode() + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text)
    print(text + "\n".join(told))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
