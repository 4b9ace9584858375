"""How fast is the worker beside transformers on the same model, threads and precision?

    python -m loadtests.bench.worker --model smollm2
    python -m loadtests.bench.worker --model gemma3 --threads 2 --report loadtests/results/worker-gemma3.json

Every case runs on every arm in turn, round after round, and what counts is the CPU time that an arm's processes took:
machines are shared. The worker is measured from outside, HTTP and all. Another engine is one more class with
`prefill` and `decode`. Owns the processes it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from loadtests.local_stack import Child, StackError, running_worker
from loadtests.plain_http import fetch

PREFILLS = (256, 1024, 2048)
BATCHES = (1, 4, 16)
SHARED_TOKENS = 800
OWN_TOKENS = 50
STEPS = 32
ORDINARY_TOKENS = range(1000, 40_000)
FIND_FOLDER = "import sys; from worker.model.loader import resolve_model; print(resolve_model(sys.argv[1]).path)"

Prompts = list[list[int]]


class Arm(Protocol):
    """An engine under test. Both answer CPU seconds."""

    def prefill(self, prompt: list[int]) -> float: ...

    def decode(self, prompts: Prompts) -> float:
        """Seconds of one step of these sequences together, whose first SHARED_TOKENS are the same."""
        ...


class WorkerArm:
    """A `headstart worker` over HTTP; the CPU time is that of its processes."""

    def __init__(self, child: Child, model: str) -> None:
        self._child, self._model = child, model

    def prefill(self, prompt: list[int]) -> float:
        return self._complete([prompt], 1)

    def decode(self, prompts: Prompts) -> float:
        self._complete([prompts[0][:SHARED_TOKENS]], 1)
        self._complete(prompts, 1)      # every prompt is cached now, but for its last block
        prompts_alone = self._complete(prompts, 1)
        return (self._complete(prompts, 1 + STEPS) - prompts_alone) / STEPS

    def _complete(self, prompts: Prompts, num_tokens: int) -> float:
        before = _cpu_seconds(self._child.process.pid)
        answer = fetch(f"{self._child.url}/v1/completions", {
            "model": self._model, "prompt": prompts, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == num_tokens * len(prompts)
        return _cpu_seconds(self._child.process.pid) - before


class TransformersArm:
    """loadtests.bench.transformers_arm in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._in: IO[bytes] | None = process.stdin
        self._out: IO[bytes] | None = process.stdout
        assert self._ask(None) == b"ready"

    def prefill(self, prompt: list[int]) -> float:
        return float(self._ask({"kind": "prefill", "tokens": [prompt]}))

    def decode(self, prompts: Prompts) -> float:
        return float(self._ask({"kind": "decode", "tokens": prompts, "steps": STEPS}))

    def _ask(self, task: dict[str, Any] | None) -> bytes:
        assert self._in is not None
        assert self._out is not None
        if task is not None:
            self._in.write(orjson.dumps(task) + b"\n")
            self._in.flush()
        answer = self._out.readline().strip()
        if not answer:
            raise StackError("transformers ended before it answered")
        return answer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.worker",
                                     description=(__doc__ or "").split("\n")[0],
                                     epilog="example: python -m loadtests.bench.worker --model gemma3 --rounds 3")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="transformers' dtype; the worker chooses its own")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        with _arms(args) as arms:
            result = _measure(arms, args)
    except StackError as error:
        print(f"an engine did not start: {error}", file=sys.stderr)
        return 1
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() if args.json else _table(result))
    return 0


@contextlib.contextmanager
def _arms(args: argparse.Namespace) -> Iterator[dict[str, Arm]]:
    """The worker and whatever peer is installed, ready to be asked."""
    threads = str(args.threads)
    found = subprocess.run([sys.executable, "-c", FIND_FOLDER, args.model], capture_output=True, text=True,
                           check=False)
    if found.returncode:
        raise StackError(found.stderr.strip())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    with running_worker(model=args.model, arguments=["--threads", threads]) as child, subprocess.Popen(
            [sys.executable, "-m", "loadtests.bench.transformers_arm", found.stdout.strip(), args.dtype, threads],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        yield {"headstart": WorkerArm(child, fetch(f"{child.url}/v1/models")["data"][0]["id"]),
               "transformers": TransformersArm(process)}


def _measure(arms: dict[str, Arm], args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(5)
    seconds: dict[str, dict[str, list[float]]] = {}
    cases_a_round = [*(("prefill", n) for n in PREFILLS), *(("decode", n) for n in BATCHES)]
    for round_index in range(args.rounds):
        for index, (kind, size) in enumerate(cases_a_round):
            if sys.stderr.isatty():
                done = round_index * len(cases_a_round) + index
                print(f"\r{done}/{args.rounds * len(cases_a_round)} {kind} {size}   ", end="", file=sys.stderr)
            prompts = _prompts(rng, kind, size)
            for name, arm in arms.items():
                taken = arm.prefill(prompts[0]) if kind == "prefill" else arm.decode(prompts)
                seconds.setdefault(f"{kind}-{size}", {}).setdefault(name, []).append(round(taken, 5))
    cases = {case: _summary(by_arm) for case, by_arm in seconds.items()}
    return {"benchmark": "worker", "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit(),
            "machine": {"cpus": os.cpu_count(), "processor": _processor(), "load": os.getloadavg()},
            "model": args.model, "threads": args.threads, "rounds": args.rounds, "unit": "CPU seconds",
            "shared_tokens": SHARED_TOKENS, "own_tokens": OWN_TOKENS, "steps": STEPS, "cases": cases}


def _prompts(rng: random.Random, kind: str, size: int) -> Prompts:
    """One prompt of `size` tokens, or `size` prompts with a common beginning; never seen before."""
    if kind == "prefill":
        return [rng.choices(ORDINARY_TOKENS, k=size)]
    shared = rng.choices(ORDINARY_TOKENS, k=SHARED_TOKENS)
    return [shared + rng.choices(ORDINARY_TOKENS, k=OWN_TOKENS) for _ in range(size)]


def _summary(by_arm: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(values), 5) for name, values in by_arm.items()}
    # Of each round's pair: what slows the machine for a while slows both.
    ratios = [theirs / ours for ours, theirs in zip(by_arm["headstart"], by_arm["transformers"], strict=True)]
    return {"median": medians, "transformers_over_headstart": round(statistics.median(ratios), 2), "all": by_arm}


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}, {result['threads']} thread(s), CPU ms, median of {result['rounds']}",
             f"{'':14}{'headstart':>12}{'transformers':>14}{'ratio':>8}"]
    for case, summary in result["cases"].items():
        ours, theirs = (summary["median"][name] * 1000 for name in ("headstart", "transformers"))
        lines.append(f"{case:14}{ours:12.1f}{theirs:14.1f}{summary['transformers_over_headstart']:8.2f}")
    return "\n".join(lines)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its live children, in the kernel's ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(_cpu_seconds(int(child)) for child in children)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    started_at = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started_at:.0f} s", file=sys.stderr)
    raise SystemExit(code)
