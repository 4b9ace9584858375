"""`make bench-simulator`: 1,000 simulated workers, 250,000 requests, one core: how long does that take?

    python -m loadtests.bench.simulator [--workers 1000] [--requests 250000] [--out FILE]

CPU time of this process, reading the workload and the yardsticks included. The result holds what `headstart simulate`
prints for the same run, so that it can be compared to the last digit.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from loadtests.provenance import provenance
from loadtests.sim.simulation import SimulationPlan, prepare, report_of, run_policy
from loadtests.workloads import WORKLOADS

WORKLOAD = "tenants"
CAPACITY = 0.5


def measure(num_workers: int, num_requests: int) -> dict[str, Any]:
    """One run of our own policy at 80 % of saturation."""
    about, began_at, began_cpu = provenance(), time.monotonic(), time.process_time()
    plan = SimulationPlan(num_workers=num_workers, capacity=CAPACITY)
    prepared = prepare(WORKLOADS[WORKLOAD](num_requests, plan.seed), plan)
    report = report_of(prepared, plan, [run_policy(prepared, "headstart", _show)])
    cpu_s = time.process_time() - began_cpu
    return {**about, "cpu_s": cpu_s, "wall_s": time.monotonic() - began_at,
            "cpu_ms_a_request": 1000 * cpu_s / num_requests, "report": report}


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty() and done % max(1, total // 200) == 0:
        print(f"\r{done}/{total}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.simulator",
                                     description="The simulator on a large fleet, in CPU time of one core.")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=250_000)
    parser.add_argument("--out", type=Path, help="also write the result as JSON")
    arguments = parser.parse_args()
    result = measure(arguments.workers, arguments.requests)
    print(f"{arguments.workers} workers, {arguments.requests} requests: {result['cpu_s']:.0f} s of CPU, "
          f"{result['cpu_ms_a_request']:.2f} ms a request, {result['wall_s']:.0f} s by the clock")
    if arguments.out is not None:
        arguments.out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
