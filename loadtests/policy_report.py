"""`make policy-report`: every workload, load and pool, ours beside every baseline; stopped and gone on with at will.

Owns what is run and in which order: all cells with one seed, then with the next, so that what is there at any moment
is a report over everything. Runs are kept in runs.jsonl beside the report, so for a change of ours baselines are not
run again (`--redo headstart`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtests.provenance import commit
from loadtests.sim.grid import Cell, cell_report, grid_report
from loadtests.sim.grid_report import as_table, write_grid
from loadtests.sim.policies import POLICIES
from loadtests.sim.run_store import RunStore, key_of
from loadtests.sim.simulation import Prepared, SimulationPlan, prepare, run_policy
from loadtests.traces import Trace, load_trace
from loadtests.workloads import WORKLOADS

FIRST_SEED = 101    # below it are the seeds that constants were chosen with
# The most telling first: who stops early has a report over these.
LOADS_AND_CAPACITIES = ((0.8, 0.2), (0.95, 0.05), (0.95, 0.2), (0.8, 0.05), (0.5, 0.2), (0.5, 0.05))


@dataclass(frozen=True, slots=True)
class Job:
    """A workload: a file below the traces' folder, or a name of WORKLOADS; how many of its requests; the fleet."""

    name: str
    requests: int
    source: str = ""
    num_workers: int = 8


# Requests by what a run costs, for a few seconds each. Pools are a share of what a run's requests hold, so short runs
# have pools that no worker has: where a few requests fill one, waits for room are all that is measured.
JOBS = (
    Job("mooncake", 1200, "mooncake/conversation_0-36min.jsonl.gz"),
    Job("claude_code", 150, "claude_code/sessions.jsonl.gz"),
    Job("azure_conv", 600, "azure2023/conv_first_two_thirds.jsonl.gz"),
    Job("azure_code", 750, "azure2023/code_first_two_thirds.jsonl.gz"),
    Job("tau_airline", 900, "agent_text/tau_airline.jsonl.gz"),
    Job("sweagent", 246, "agent_text/sweagent_demos.jsonl.gz"),
    Job("mtbench_questions", 318, "agent_text/mtbench_questions.jsonl.gz"),
    Job("llm_d", 600), Job("hot_prefix_25", 2000), Job("hot_prefix_100", 2000), Job("sibling_bursts", 1600),
    Job("zero_sharing", 750), Job("mt_bench", 2400), Job("tenants", 4000))
# Without the two traces that have one or two requests a worker at this size (sweagent, mtbench_questions).
LARGE_JOBS = (
    Job("mooncake", 3000, "mooncake/conversation_0-36min.jsonl.gz", num_workers=64),
    Job("claude_code", 300, "claude_code/sessions.jsonl.gz", num_workers=64),
    Job("azure_conv", 2000, "azure2023/conv_first_two_thirds.jsonl.gz", num_workers=64),
    Job("azure_code", 2400, "azure2023/code_first_two_thirds.jsonl.gz", num_workers=64),
    Job("tau_airline", 1816, "agent_text/tau_airline.jsonl.gz", num_workers=64),
    Job("llm_d", 1800, num_workers=64), Job("hot_prefix_25", 4000, num_workers=64),
    Job("hot_prefix_100", 4000, num_workers=64), Job("sibling_bursts", 4000, num_workers=64),
    Job("zero_sharing", 1600, num_workers=64), Job("mt_bench", 4000, num_workers=64),
    Job("tenants", 5000, num_workers=64))


class Report:
    """`traces` is the folder of the trace files."""

    def __init__(self, traces: Path, folder: Path, policies: Sequence[str], jobs: Sequence[Job]) -> None:
        self._traces = traces
        self._folder = folder
        self._policies = policies
        self._jobs = jobs
        self._commit = commit()
        self._seed = -1
        self._kept: dict[Job, Trace] = {}
        self.store = RunStore(folder / "runs.jsonl")

    def fill(self, seeds: Sequence[int], until: float) -> None:
        """Run what is missing; no new run begins after `until` (time.time())."""
        for seed in seeds:
            for job, plan in self._cells(seed):
                self._fill_cell(job, plan, until)

    def cells(self, seeds: Sequence[int], policies: Sequence[str]) -> list[dict[str, Any]]:
        """Every cell with the seeds for which all `policies` have been run."""
        found = []
        for job, plan in self._cells(seeds[0]):
            rows = [[self.store.get(self._key(job, replace(plan, seed=seed), policy)) for policy in policies]
                    for seed in seeds]
            whole = [[row for row in of_seed if row is not None] for of_seed in rows if None not in of_seed]
            if whole:
                by_seed = [{row["run"]["policy"]: row["run"] for row in of_seed} for of_seed in whole]
                found.append(cell_report(Cell(job.name, plan, len(whole)), by_seed, trace_name=job.name,
                                         requests=whole[0][0]["requests"],
                                         blocks_per_worker=whole[0][0]["blocks_per_worker"]))
        return found

    def write(self, seeds: Sequence[int], policies: Sequence[str]) -> dict[str, Any]:
        """What is there so far."""
        report = grid_report(self.cells(seeds, policies), SimulationPlan())
        report["commits"] = {policy: self.store.commits(policy) for policy in policies}
        write_grid(report, self._folder)
        return report

    def _cells(self, seed: int) -> Iterator[tuple[Job, SimulationPlan]]:
        for load, capacity in LOADS_AND_CAPACITIES:
            for job in self._jobs:
                yield job, SimulationPlan(num_workers=job.num_workers, load=load, capacity=capacity, seed=seed)

    def _fill_cell(self, job: Job, plan: SimulationPlan, until: float) -> None:
        prepared: Prepared | None = None
        for policy in self._policies:
            key = self._key(job, plan, policy)
            if self.store.get(key) is not None or time.time() >= until:
                continue
            if prepared is None:
                prepared = prepare(self._trace(job, plan.seed), plan)
            row = self._twin(job, plan, policy, prepared.settings.blocks_per_worker)
            if row is None:
                row = {"run": run_policy(prepared, policy).as_dict(), "requests": len(prepared.trace.requests),
                       "blocks_per_worker": prepared.settings.blocks_per_worker}
            self.store.put(key, row, self._commit)

    def _twin(self, job: Job, plan: SimulationPlan, policy: str, blocks_per_worker: int) -> dict[str, Any] | None:
        """The run at another capacity, where the longest request needs more than either: it is the same run."""
        for _, capacity in LOADS_AND_CAPACITIES:
            row = self.store.get(self._key(job, replace(plan, capacity=capacity), policy))
            if row is not None and row["blocks_per_worker"] == blocks_per_worker:
                return row
        return None

    def _key(self, job: Job, plan: SimulationPlan, policy: str) -> tuple[object, ...]:
        return key_of(job.name, job.requests, plan, policy)

    def _trace(self, job: Job, seed: int) -> Trace:
        """Those of one seed are kept: reading a large file takes longer than simulating its beginning."""
        if seed != self._seed:
            self._seed, self._kept = seed, {}
        if job not in self._kept:
            self._kept[job] = (load_trace(self._traces / job.source, seed=seed).head(job.requests) if job.source
                               else WORKLOADS[job.name](job.requests, seed))
        return self._kept[job]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    policies = list(POLICIES) if args.policy == "all" else args.policy.split(",")
    jobs = [job for job in (LARGE_JOBS if args.large else JOBS) if not args.jobs or job.name in args.jobs.split(",")]
    report = Report(args.traces, args.report, policies, jobs)
    report.store.forget(set(args.redo.split(",")))
    seeds = range(args.seed, args.seed + args.seeds)
    report.fill(seeds, time.time() + args.minutes * 60)
    sys.stdout.write(as_table(report.write(seeds, policies)) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="policy-report", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the trace files")
    parser.add_argument("--report", type=Path, required=True, help="the folder of runs.jsonl and the report")
    parser.add_argument("--policy", default="all")
    parser.add_argument("--redo", default="", help="policies whose runs count no more")
    parser.add_argument("--jobs", default="", help="some of the workloads")
    parser.add_argument("--large", action="store_true", help="64 workers")
    parser.add_argument("--seed", type=int, default=FIRST_SEED)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins later than this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
