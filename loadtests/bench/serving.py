"""What scheduling is worth, on a real worker over HTTP: batching, a long prefill beside answers, the first request.

    python -m loadtests.bench.serving batching     continuous against static batching
    python -m loadtests.bench.serving stall        the gaps of 8 streams while a 6,000-token prompt arrives
    python -m loadtests.bench.serving first        the first request after ready against the tenth
    python -m loadtests.bench.serving overhead     what of a step at batch 16 is not the model
    python -m loadtests.bench.serving streams      what streaming to 64 clients costs the engine

Arms are interleaved, round after round, and a worker that is not measured is idle. Wall-clock figures of a shared
machine drift; the ratios within a run are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from loadtests.bench import serving_arms as arms
from loadtests.local_stack import Child, StackError, running_worker
from loadtests.streaming_client import AnswerError

Result = dict[str, Any]
GROUPS = (1, 3)
# By proof: on idle cores each takes about two minutes.
ROUNDS = {"batching": 1, "stall": 1, "first": 3, "overhead": 3, "streams": 3}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write the report. 1 when a worker did not start or broke off."""
    args = _arguments(argv)
    proof: Callable[[argparse.Namespace], Awaitable[Result]] = PROOFS[args.proof]
    try:
        result = {"proof": args.proof, **_conditions(args), **asyncio.run(proof(args))}  # type: ignore[arg-type]
    except (StackError, AnswerError) as error:
        print(f"a worker failed: {error}", file=sys.stderr)
        return 1
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n"
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_bytes(text)
    print(text.decode())
    return 0


async def _batching(args: argparse.Namespace) -> Result:
    """One group of sixteen alone, and several on end. Alone, the long answer decides how long both take, since the
    short ones behind it are then one quick batch: throughput shows where the next long one has to wait as well."""
    with _worker(args) as continuous, _worker(args, "--batching", "static") as static:
        rows: dict[int, list[Result]] = {groups: [] for groups in GROUPS}
        async with _session() as session:
            for number, groups in itertools.product(range(args.rounds), GROUPS):
                rows[groups].append({name: await arms.staggered(session, worker.url, seed=2 * number + index,
                                                                groups=groups, pid=worker.process.pid)
                                     for index, (name, worker) in enumerate((("continuous", continuous),
                                                                             ("static", static)))})
    return {f"{groups} group(s)": {"rounds": rounds,
                                   "short_p95_ratio": _median_ratio(rounds, "short_p95_s"),
                                   "throughput_ratio": _median_ratio(rounds, "tokens_per_s"),
                                   "tokens_per_cpu_s_ratio": _median_ratio(rounds, "tokens_per_cpu_s")}
            for groups, rounds in rows.items()}


def _median_ratio(rounds: Sequence[Result], key: str) -> float:
    """Continuous over static."""
    return statistics.median(float(each["continuous"][key] / each["static"][key]) for each in rounds)


async def _stall(args: argparse.Namespace) -> Result:
    """Streams without and with the long prompt, under the target and without one."""
    rows: list[Result] = []
    with _worker(args, "--target-itl-ms", str(args.target_itl_ms)) as bound, \
            _worker(args, "--target-itl-ms", "0") as free:
        async with _session() as session:
            for number in range(args.rounds):
                for name, worker in (("target", bound), ("no target", free)):
                    gaps = await arms.gaps_beside_a_prefill(session, worker.url, seed=number)
                    rows.append({"arm": name, "round": number, **gaps,
                                 "scheduling": (await arms.get_json(session, f"{worker.url}/kv"))["scheduling"]})
    raised = {name: statistics.median(float(row["raised_p99_s"]) for row in rows if row["arm"] == name)
              for name in ("target", "no target")}
    return {"target_itl_ms": args.target_itl_ms, "rows": rows, "raised_p99_s": raised}


async def _first(args: argparse.Namespace) -> Result:
    """A worker of its own for each round: only its first request is a first one."""
    rounds: list[Result] = []
    for number in range(args.rounds):
        with _worker(args) as worker:
            async with _session() as session:
                ttft_s, cpu_s = await arms.ten_distinct_prompts(session, worker.url, seed=number,
                                                                pid=worker.process.pid)
        rounds.append({"ttft_s": ttft_s, "cpu_s": cpu_s, "first_over_tenth": ttft_s[0] / ttft_s[-1],
                       "first_over_tenth_cpu": cpu_s[0] / cpu_s[-1],
                       "first_over_median_cpu": cpu_s[0] / statistics.median(cpu_s[1:])})
    return {"rounds": rounds,
            **{key: statistics.median(float(each[key]) for each in rounds)
               for key in ("first_over_tenth", "first_over_tenth_cpu", "first_over_median_cpu")}}


async def _overhead(args: argparse.Namespace) -> Result:
    with _worker(args) as worker:
        async with _session() as session:
            rounds = [await arms.overhead_at_batch_16(session, worker.url, seed=number)
                      for number in range(args.rounds)]
    return {"rounds": rounds, "overhead_ratio": statistics.median(each["overhead_ratio"] for each in rounds)}


async def _streams(args: argparse.Namespace) -> Result:
    rounds: list[dict[str, float]] = []
    with _worker(args) as worker:
        async with _session() as session:
            for number in range(args.rounds):
                rounds.append({name: await arms.engine_cpu_of_64(session, worker.url, seed=2 * number + index,
                                                                 stream=name == "streamed", pid=worker.process.pid)
                               for index, name in enumerate(("whole", "streamed"))})
    return {"cpu_s_per_token": rounds,
            "streamed_over_whole": statistics.median(each["streamed"] / each["whole"] for each in rounds)}


PROOFS = {"batching": _batching, "stall": _stall, "first": _first, "overhead": _overhead, "streams": _streams}


@contextlib.contextmanager
def _worker(args: argparse.Namespace, *flags: str) -> Iterator[Child]:
    basics = ["--threads", str(args.threads), "--kv-memory", args.kv_memory, "--log-level", "warning"]
    with running_worker(model=args.model, arguments=[*basics, *flags]) as worker:
        yield worker


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900))


def _conditions(args: argparse.Namespace) -> Result:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "")
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip(), "cpu": model,
            "cores": os.cpu_count(), "load": os.getloadavg()[0], "model": args.model, "threads": args.threads}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.serving",
                                     description=(__doc__ or "").split("\n")[0],
                                     epilog="example: python -m loadtests.bench.serving batching --rounds 3")
    parser.add_argument("proof", choices=sorted(PROOFS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-memory", default="384MiB")
    parser.add_argument("--rounds", type=int, help=f"by default {ROUNDS}")
    parser.add_argument("--target-itl-ms", type=float, default=200.0)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or ROUNDS[args.proof]
    return args


if __name__ == "__main__":
    sys.exit(main())
