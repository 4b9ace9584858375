"""How fast is the worker beside other engines on the same model, threads and precision?

    python -m loadtests.bench.worker --model smollm2
    python -m loadtests.bench.worker --model gemma3 --threads 2 --llama-server PATH --gguf FILE --vllm PATH

Every case runs on every engine in turn, round after round, and while one runs the others sleep. transformers is
always there; llama.cpp and vLLM are when their flags name them, and otherwise left out with that reason. Wall-clock
figures need a machine that nobody else uses; ratios within a run are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from loadtests.bench import engines
from loadtests.bench.engine_cases import Case, Figure, all_cases
from loadtests.bench.engines import Engine
from loadtests.local_stack import StackError

FIND_FOLDER = "import sys; from worker.model.loader import resolve_model; print(resolve_model(sys.argv[1]).path)"
SEED = 5
OURS = "headstart"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the report. 1 when an engine did not start or broke off."""
    args = _arguments(argv)
    try:
        with _engines(args) as (started, left_out):
            result = {**_conditions(args), "left_out": left_out,
                      "engines": {engine.name: engine.version for engine in started},
                      "cases": measure(started, _chosen_cases(args.cases), args.rounds)}
    except StackError as error:
        print(f"an engine failed: {error}", file=sys.stderr)
        return 1
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() if args.json else table(result))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.worker",
                                     description=(__doc__ or "").split("\n")[0],
                                     epilog="example: python -m loadtests.bench.worker --model gemma3 --rounds 3")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", default="", help="only cases whose name contains this, or one of these (a,b)")
    parser.add_argument("--dtype", default="bfloat16", help="of transformers; the worker chooses its own")
    parser.add_argument("--llama-server", help="llama.cpp's server; needs --gguf")
    parser.add_argument("--gguf", help="the same model for llama.cpp, in like precision")
    parser.add_argument("--vllm", help="vLLM's command")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if bool(args.llama_server) != bool(args.gguf):
        parser.error("--llama-server and --gguf go together")
    return args


def _chosen_cases(parts_of_names: str) -> list[Case]:
    parts = parts_of_names.split(",")
    return [case for case in all_cases() if any(part in name for part in parts for name in case.names)]


@contextlib.contextmanager
def _engines(args: argparse.Namespace) -> Iterator[tuple[list[Engine], dict[str, str]]]:
    """The worker and whatever peers there are, asleep; and why the others are not there."""
    found = subprocess.run([sys.executable, "-c", FIND_FOLDER, args.model], capture_output=True, text=True,
                           check=False)
    if found.returncode:
        raise StackError(found.stderr.strip())
    folder = found.stdout.strip()
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        started: list[Engine] = [stack.enter_context(engines.headstart(args.model, args.threads)),
                                 stack.enter_context(engines.transformers(folder, args.dtype, args.threads))]
        if args.llama_server:
            started.append(stack.enter_context(engines.llama_cpp(args.llama_server, args.gguf, args.threads)))
        else:
            left_out["llama.cpp"] = "no --llama-server"
        if args.vllm:
            started.append(stack.enter_context(engines.vllm(args.vllm, folder, args.threads)))
        else:
            left_out["vllm"] = "no --vllm"
        yield started, left_out


def measure(started: Sequence[Engine], cases: Sequence[Case], rounds: int) -> dict[str, Any]:
    """Figures by name and engine. A first round of the first case is thrown away: it warms what warms once."""
    for engine in started:
        cases[0].run(engine, random.Random(SEED - 1))
    figures: dict[str, dict[str, list[Figure]]] = {}
    for round_index in range(rounds):
        for index, case in enumerate(cases):
            _progress(round_index * len(cases) + index, rounds * len(cases), case.names[0])
            # The same prompts for every engine, other ones in every round, and another engine first.
            first = round_index % len(started)
            for engine in (*started[first:], *started[:first]):
                for figure in case.run(engine, random.Random(f"{SEED} {round_index} {case.names[0]}")):
                    figures.setdefault(figure.name, {}).setdefault(engine.name, []).append(figure)
    _progress(0, 0, "")
    return {name: _summary(by_engine) for name, by_engine in figures.items()}


def _summary(by_engine: dict[str, list[Figure]]) -> dict[str, Any]:
    """Medians, and how many times faster we are than each peer, round by round."""
    ours, ratios = by_engine[OURS], {}
    for name, theirs in by_engine.items():
        if name != OURS:
            ratios[name] = round(statistics.median(
                mine.value / other.value if mine.more_is_better else other.value / mine.value
                for mine, other in zip(ours, theirs, strict=True)), 3)
    return {"unit": ours[0].unit, "times_faster_than": ratios,
            "median": {name: statistics.median(each.value for each in found) for name, found in by_engine.items()},
            "all": {name: {"values": [round(each.value, 2) for each in found],
                           "cpu_s": [round(each.cpu_s, 3) for each in found]} for name, found in by_engine.items()}}


def table(result: dict[str, Any]) -> str:
    """For people: a line a case, a column an engine, and how many times faster we are than the best of the others."""
    names = list(result["engines"])
    lines = [f"{result['model']}, {result['threads']} thread(s), median of {result['rounds']} interleaved rounds, "
             f"commit {result['commit']}",
             f"{'':30}{'':6}" + "".join(f"{name:>14}" for name in names) + f"{'ours / best':>14}"]
    for name, case in result["cases"].items():
        cells = "".join(f"{case['median'][engine]:14.1f}" if engine in case["median"] else f"{'-':>14}"
                        for engine in names)
        peers = case["times_faster_than"].values()
        lines.append(f"{name:30}{case['unit']:6}{cells}" + (f"{min(peers):13.2f}x" if peers else ""))
    return "\n".join(lines)


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {"benchmark": "worker", "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": engines.git_commit(), "model": args.model, "threads": args.threads, "rounds": args.rounds,
            "machine": {"cpus": os.cpu_count(), "processor": _processor(), "load": os.getloadavg()}}


def _progress(done: int, total: int, name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{done}/{total} {name}" if total else "\r\033[K", end="", file=sys.stderr, flush=True)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown"


if __name__ == "__main__":
    started_at = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started_at:.0f} s", file=sys.stderr)
    raise SystemExit(code)
