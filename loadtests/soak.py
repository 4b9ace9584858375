"""`make soak`: a million requests of every kind over workers that are killed, and nothing is lost, kept or wrong.

    python -m loadtests.soak
    python -m loadtests.soak --requests 20000 --real-requests 0 --json out.json

Part A: workers that compute nothing and publish KV events (soak_worker.py). Part B: real workers on a tiny seeded
model, exact. One gateway process, clients that leave, dawdle, half-close and send rubbish, SIGKILL for a worker every
few seconds. Checked at the end: every request got its whole answer or a documented error; ledgers are at zero; memory
is flat; no task and no socket is left. What is known so far goes to a file every half minute, and Ctrl-C ends a run
early and judges what there was.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from loadtests.local_stack import Child, start
from loadtests.soak_client import Plan, Tally, drive
from loadtests.soak_fleet import Fleet, Held, running_fleet
from loadtests.soak_plans import stub_plans, tiny_bodies, tiny_plans
from loadtests.tiny_model import write_tiny_model

NUM_WORKERS = 3
NUM_TINY_PROMPTS = 64
SAMPLE_S = 5.0
SHOWN_SAMPLES = 60
SHOW_S, TELL_S = 1.0, 30.0
PROGRESS_FILE = Path("build/soak-progress.json")
LOG_MAX_BYTES = 100_000_000
# Part A never asks the same twice, so its gateway remembers fewer texts: that memory is full within 10,000 requests.
TEXT_MEMORY_BYTES = 8 * 1024 * 1024
# Caches fill in the first tenth of a run. Of the rest the last fifth may hold so much of what the first fifth did.
FILLING_RATIO, GROWTH_MAX_RATIO = 0.1, 1.05
FLAT = "memory is flat"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """How much of what, and for how long at the most."""

    name: str
    num_requests: int
    num_lanes: int
    kill_every_s: float
    seed: int
    until: float | None
    progress_file: Path


@dataclass
class Interruption:
    """Whether somebody wants the run to end."""

    has_come: bool = False

    def listen(self) -> None:
        """Ctrl-C and SIGTERM, from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._come)

    def _come(self) -> None:
        self.has_come = True
        print("ending early: what is under way is finished and judged", file=sys.stderr)


interruption = Interruption()


async def soak(part: Part, fleet: Fleet, plans: Iterator[Plan]) -> dict[str, object]:
    """Send it all, and say what came of it."""
    before, tally, cpu_before = await fleet.at_rest(), Tally(), fleet.cpu_s()
    began_at = fleet.began_at = time.monotonic()
    interruption.listen()
    helpers = [asyncio.create_task(fleet.kill_now_and_then(part.kill_every_s, random.Random(part.seed))),
               asyncio.create_task(fleet.sample(SAMPLE_S, lambda: tally.num_done)),
               asyncio.create_task(_show(part, fleet, tally))]
    await drive(fleet.port, plans, tally, num_lanes=part.num_lanes, seed=part.seed, is_over=lambda: (
        interruption.has_come or (part.until is not None and time.monotonic() > part.until)))
    seconds, cpu_s = time.monotonic() - began_at, fleet.cpu_s()
    for helper in helpers:
        helper.cancel()
    await asyncio.gather(*helpers, return_exceptions=True)
    load, after = await fleet.settle(before)
    is_flat, memory = memory_verdict(fleet.samples)
    confessions = [line[:2000] for line in fleet.gateway.log_tail(LOG_MAX_BYTES).splitlines()
                   if "internal_error" in line or "Traceback" in line]
    checks = {
        "every request got its whole answer or a documented error": not tally.num_problems,
        "ledgers are at zero": not any(load.values()), FLAT: is_flat,
        "no socket is left": after.sockets <= fleet.sockets_max(before),
        "no task is left": after.tasks <= before.tasks,
        "the gateway lives and has nothing to confess": fleet.gateway.process.poll() is None and not confessions}
    return {**_so_far(part, fleet, tally, seconds), "was_interrupted": interruption.has_come,
            "cpu_us_a_request": {name: round((cpu_s[name] - cpu_before[name]) / tally.num_done * 1e6)
                                 for name in cpu_s},
            "checks": checks, "ok": all(checks.values()), "confessions": confessions[:10],
            "retries": fleet.metric("headstart_retries_total"),
            "migrations": fleet.metric("headstart_migrations_total"), "left_over": load,
            "before": asdict(before), "after": asdict(after), "memory": memory}


def _so_far(part: Part, fleet: Fleet, tally: Tally, seconds: float) -> dict[str, object]:
    """What can be told at any moment."""
    return {"part": part.name, "requests": tally.num_done, "asked_for": part.num_requests,
            "seconds": round(seconds, 1), "requests_per_s": round(tally.num_done / seconds, 1),
            "worker_kills": fleet.num_kills, "outcomes": dict(sorted(tally.outcomes.items())),
            "documented_errors": dict(tally.errors), "problems": tally.problems, "num_problems": tally.num_problems,
            "missed_samples": fleet.num_missed_samples,
            "samples": [asdict(held) for held in fleet.samples[::max(1, len(fleet.samples) // SHOWN_SAMPLES)]]}


def memory_verdict(samples: list[Held]) -> tuple[bool, dict[str, float]]:
    """Whether a run holds as much at its end as once its caches were full; too short a run says nothing."""
    full_after = FILLING_RATIO * max((held.requests for held in samples), default=0)
    judged = [held for held in samples if held.requests >= full_after]
    fifth = len(judged) // 5
    if fifth < 2:
        return True, {}
    early = statistics.median(held.rss_bytes for held in judged[:fifth])
    late = statistics.median(held.rss_bytes for held in judged[-fifth:])
    return late <= GROWTH_MAX_RATIO * early, {
        "judged_from_request": judged[0].requests, "early_mib": round(early / 2**20, 1),
        "late_mib": round(late / 2**20, 1), "late_max_mib": round(GROWTH_MAX_RATIO * early / 2**20, 1)}


async def _show(part: Part, fleet: Fleet, tally: Tally) -> None:
    is_terminal, began_at = sys.stderr.isatty(), time.monotonic()
    told_at = began_at
    part.progress_file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        await asyncio.sleep(SHOW_S if is_terminal else TELL_S)
        now = time.monotonic()
        if now - told_at >= TELL_S:
            told_at = now
            part.progress_file.write_bytes(orjson.dumps(_so_far(part, fleet, tally, now - began_at),
                                                        option=orjson.OPT_INDENT_2))
        bar = "#" * int(30 * tally.num_done / max(1, part.num_requests))
        rate = tally.num_done / (now - began_at)
        left_s = (part.num_requests - tally.num_done) / rate if rate else 0.0
        if tally.problems and not is_terminal:
            print(f"last problem: {tally.problems[-1][:400]}", file=sys.stderr)
        print(f"{part.name} [{bar:<30}] {tally.num_done:,}/{part.num_requests:,} {rate:,.0f}/s {left_s / 60:.0f} min "
              f"left, {tally.num_problems} problems", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)


def _stub_worker(port: int, tokens: dict[str, str]) -> Child:
    return start(["loadtests.soak_worker", f"--port={port}"], url=f"http://127.0.0.1:{port}", env=tokens,
                 hears_ctrl_c=False)


async def part_a(part: Part) -> dict[str, object]:
    """Over workers that compute nothing."""
    async with running_fleet(_stub_worker, num_workers=NUM_WORKERS,
                             arguments=[f"--text-memory-bytes={TEXT_MEMORY_BYTES}"]) as fleet:
        return await soak(part, fleet, stub_plans(part.num_requests, part.seed))


async def part_b(part: Part) -> dict[str, object]:
    """Over real workers. The answers that count are those of the same gateway before anything is disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        model = await asyncio.to_thread(write_tiny_model, Path(folder))

        def tiny_worker(port: int, tokens: dict[str, str]) -> Child:
            return start(["worker", f"--model={model}", f"--port={port}", "--threads=1", "--kv-memory=8MiB",
                          "--served-name=tiny", "--exactness=strict", "--log-level=warning"],
                         url=f"http://127.0.0.1:{port}", env={**tokens, "OMP_NUM_THREADS": "1"},
                         hears_ctrl_c=False)

        async with running_fleet(tiny_worker, num_workers=NUM_WORKERS) as fleet:
            bodies = tiny_bodies("tiny", NUM_TINY_PROMPTS, part.seed)
            texts = [await asyncio.to_thread(_text_of, fleet, body) for body in bodies]
            return await soak(part, fleet, tiny_plans(bodies, texts, part.num_requests, part.seed))


def _text_of(fleet: Fleet, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(fleet.gateway.url + "/v1/completions", data=orjson.dumps(body),
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = orjson.loads(response.read())["choices"][0]["text"]
    return orjson.dumps(text)[1:-1]


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"], cwd=ROOT,
                           capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.soak",
                                     description="The gateway under everything at once.",
                                     epilog="example: python -m loadtests.soak --requests 20000 --real-requests 500")
    parser.add_argument("--requests", type=int, default=1_000_000, help="over workers that compute nothing; 0: none")
    parser.add_argument("--real-requests", type=int, default=20_000, help="over real workers; 0: none")
    parser.add_argument("--lanes", type=int, default=96, help="clients at a time")
    parser.add_argument("--kill-every-s", type=float, default=20.0, help="between two SIGKILLs of part A, on average")
    parser.add_argument("--kill-real-every-s", type=float, default=60.0, help="the same for part B")
    parser.add_argument("--seconds", type=float, default=None, help="begin no request of a part after this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result there")
    parser.add_argument("--progress", type=Path, default=PROGRESS_FILE, metavar="FILE",
                        help="where what is known so far goes")
    return parser.parse_args()


def _part(name: str, num_requests: int, kill_every_s: float, arguments: argparse.Namespace) -> Part:
    until = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    return Part(name, num_requests, arguments.lanes, kill_every_s, arguments.seed, until, arguments.progress)


def verdict(part: dict[str, Any]) -> str:
    """What came of a part, for people."""
    memory = part["memory"]
    size = f"{memory['early_mib']} to {memory['late_mib']} MiB" if memory else "too short to judge memory"
    checks = {check: holds for check, holds in part["checks"].items() if memory or check != FLAT}
    lines = [f"part {part['part']}: {'PASSED' if part['ok'] else 'FAILED'}: {part['requests']:,} of "
             f"{part['asked_for']:,} requests in {part['seconds']:,.0f} s, {part['worker_kills']} kills, {size}",
             *(f"  {'ok    ' if holds else 'FAILED'} {check}" for check, holds in checks.items())]
    return "\n".join(lines)


def main() -> int:
    """Run both parts; 1 when a check fails."""
    arguments = _arguments()
    result: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": _commit(),
                                 "seed": arguments.seed, "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                                 "load_average_before": os.getloadavg()}
    parts = []
    if arguments.requests:
        parts.append(uvloop.run(part_a(_part("A", arguments.requests, arguments.kill_every_s, arguments))))
    if arguments.real_requests and not interruption.has_come:
        parts.append(uvloop.run(part_b(_part("B", arguments.real_requests, arguments.kill_real_every_s, arguments))))
    result |= {"load_average_after": os.getloadavg(), "parts": parts}
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text)
    print(text, end="")
    for part in parts:
        print(verdict(part), file=sys.stderr)
    return 0 if all(part["ok"] for part in parts) and not interruption.has_come else 1


if __name__ == "__main__":
    sys.exit(main())
