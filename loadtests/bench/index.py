"""The prefix index beside others: Dynamo's radix tree from its wheel, and a dict of holder masks, in one run.

    python -m loadtests.bench.index --dynamo /path/to/venv/bin/python [--out results.json] [--claims 10000000]

Every round measures each arm once, beginning with the next arm. Figures are CPU time of the arm's process: the
fastest round and the median. Dynamo runs in a process of its own, since it lives in an environment of its own;
without `--dynamo` it is left out, and the report says so. `--claims` adds our index alone at that size, with 64 and
1,000 endpoints: bytes a claim, and whether figures hold.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson

from gateway.routing.handles import Handles
from gateway.routing.prefix_index import PrefixIndex
from loadtests.bench.index_arms import CASES, NUM_BLOCKS, NUM_ENDPOINTS, Arm, DictArm, HolderMasks, OurArm

ROUNDS = 25
ROOMY_BYTES = 1 << 40
SEED = 11
MEMORY_CHAINS, SHARERS = 100, (1, 8)
LARGE_ENDPOINTS = (64, 1000)
SWEPT_BLOCKS_A_STEP = 128
DYNAMO_ARM = Path(__file__).with_name("index_dynamo.py")


class Figure(NamedTuple):
    """`ratio`: how many times the arm's best is of ours in the same case; under 1, it is better than ours."""

    case: str
    arm: str
    best: float
    median: float
    unit: str
    ratio: float


class DynamoArm:
    """The same cases in another interpreter, one line of JSON each way."""

    name = "dynamo RadixTree"

    def __init__(self, python: str) -> None:
        self._child = subprocess.Popen([python, str(DYNAMO_ARM), str(SEED)], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        self.version = str(self._read()["version"])

    def measure(self, case: str) -> float:
        """CPU microseconds of the case."""
        assert self._child.stdin is not None
        self._child.stdin.write(case + "\n")
        self._child.stdin.flush()
        return float(self._read()["us"])

    def close(self) -> None:
        """End the process."""
        pipe: IO[str] | None = self._child.stdin
        if pipe is not None:
            pipe.close()
        self._child.wait(10)

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the other interpreter ended; does it have ai-dynamo-runtime?"
        return dict(orjson.loads(line))


def compared(arms: list[Arm]) -> Iterator[Figure]:
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        turn = number % len(arms)
        for case in CASES:
            for arm in arms[turn:] + arms[:turn]:
                times.setdefault((case, arm.name), []).append(arm.measure(case))
    for case, unit in CASES.items():
        ours = min(times[case, arms[0].name])
        for arm in arms:
            measured = times[case, arm.name]
            yield Figure(case, arm.name, min(measured), statistics.median(measured), unit, min(measured) / ours)


def memory_figures() -> Iterator[Figure]:
    """Bytes a claim as tracemalloc counts them; Dynamo's memory is not Python's, so it is not in here."""
    makers: dict[str, Callable[[], PrefixIndex | HolderMasks]] = {
        OurArm.name: lambda: PrefixIndex(ROOMY_BYTES), DictArm.name: lambda: HolderMasks()}
    for sharers in SHARERS:
        ours = 0.0
        for name, make in makers.items():
            rng = random.Random(SEED)
            gc.collect()
            tracemalloc.start()
            index = make()
            for _ in range(MEMORY_CHAINS):
                chain = [rng.getrandbits(64) for _ in range(NUM_BLOCKS)]
                for number in range(sharers):
                    index.store(f"e{number}", chain)
            del chain
            a_claim = tracemalloc.get_traced_memory()[0] / (MEMORY_CHAINS * NUM_BLOCKS * sharers)
            tracemalloc.stop()
            ours = ours or a_claim
            yield Figure(f"memory, {sharers} endpoints a block", name, a_claim, a_claim, "B/claim", a_claim / ours)


def large_figures(num_claims: int) -> Iterator[Figure]:
    """Our index alone at full size, every block held by one endpoint: the dearest claims there are."""
    for num_endpoints in LARGE_ENDPOINTS:
        yield from _large(num_claims, num_endpoints)


def _large(num_claims: int, num_endpoints: int) -> Iterator[Figure]:
    title = f"{num_claims:,} claims, {num_endpoints} endpoints: "
    rng = np.random.default_rng(SEED)
    gc.collect()
    before = _resident_bytes()
    index, handles = PrefixIndex(ROOMY_BYTES), [Handles() for _ in range(num_endpoints)]
    spent = 0.0
    chain: list[int] = []
    for number in range(num_claims // NUM_BLOCKS):
        chain = rng.integers(0, 1 << 64, NUM_BLOCKS, dtype=np.uint64).tolist()
        began_at = time.thread_time()
        index.store(f"e{number % num_endpoints}", chain)
        spent += time.thread_time() - began_at
    yield _alone(title + "store", spent * 1e6 / num_claims, "us/block")
    yield _alone(title + "memory", (_resident_bytes() - before) / num_claims, "B/claim")
    for number in range(num_claims // NUM_BLOCKS):
        for engine_hash in rng.integers(0, 1 << 64, NUM_BLOCKS, dtype=np.uint64).tolist():
            handles[number % num_endpoints].put(engine_hash, engine_hash)
    yield _alone(title + "memory, engine hashes included", (_resident_bytes() - before) / num_claims, "B/claim")
    for endpoint in range(num_endpoints):
        index.store(f"e{endpoint}", chain[:NUM_BLOCKS * (endpoint + 1) // num_endpoints])
    yield _alone(title + "match where all end at other depths", _best_us(lambda: index.match(chain, 0.0)), "us")
    yield _alone(title + "store of 16 new blocks", _best_us(
        lambda: index.store("e1", [random.getrandbits(64) for _ in range(16)], parent=chain[-1])), "us")
    yield from _purge(title, index)


def _purge(title: str, index: PrefixIndex) -> Iterator[Figure]:
    steps = []
    num_blocks = index.num_blocks("e1")
    index.retire("e1")
    is_left = True
    while is_left:
        began = time.thread_time_ns()
        is_left = index.sweep(SWEPT_BLOCKS_A_STEP)
        steps.append((time.thread_time_ns() - began) / 1000)
    yield _alone(title + f"purge of one, {num_blocks:,} blocks", sum(steps) / num_blocks, "us/block")
    yield _alone(title + "turns of that purge, 99 of 100 at most", sorted(steps)[-1 - len(steps) // 100], "us")


def _alone(case: str, value: float, unit: str) -> Figure:
    return Figure(case, OurArm.name, value, value, unit, 1.0)


def _best_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(4 * ROUNDS):
        began = time.thread_time_ns()
        work()
        times.append((time.thread_time_ns() - began) / 1000)
    return min(times)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def about() -> dict[str, str]:
    """Where and of what this was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    return {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(), "cpu": cpu,
            "python": platform.python_version(), "seed": str(SEED)}


def measure(dynamo_python: str | None, num_claims: int) -> tuple[list[Figure], str]:
    """The figures, and which Dynamo was among the arms, or why none was."""
    arms: list[Arm] = [OurArm(random.Random(SEED)), DictArm(random.Random(SEED))]
    dynamo = None if dynamo_python is None else DynamoArm(dynamo_python)
    if dynamo is not None:
        arms.append(dynamo)
    measured = [*compared(arms), *memory_figures()]
    if dynamo is not None:
        dynamo.close()
    if num_claims:
        measured += large_figures(num_claims)
    return measured, (f"ai-dynamo-runtime {dynamo.version}" if dynamo is not None
                      else "left out: no interpreter that has ai-dynamo-runtime was named")


def as_line(figure: Figure) -> str:
    return (f"{figure.case:<78}{figure.arm:<20}{figure.best:>10.2f}{figure.median:>10.2f} median {figure.unit:<9}"
            f"{figure.ratio:>8.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.index",
                                     description="The prefix index beside Dynamo's and a dict's.")
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter that has ai-dynamo-runtime")
    parser.add_argument("--claims", type=int, default=1_000_000, help="size for our index alone; 0: not (1000000)")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    measured, dynamo = measure(arguments.dynamo, arguments.claims)
    facts = {**about(), "endpoints": str(NUM_ENDPOINTS), "blocks": str(NUM_BLOCKS), "dynamo": dynamo}
    print("\n".join(map(as_line, measured)))
    print(f"dynamo: {dynamo}", file=sys.stderr)
    if arguments.out is not None:
        report = {"about": facts, "figures": [figure._asdict() for figure in measured]}
        arguments.out.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
