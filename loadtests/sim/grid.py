"""Many simulations as one report: traces, fleets, loads and capacities, each with several seeds and all policies.

Owns the order of runs and the report's shape. A cell is one trace under one plan; its seeds are paired. It must never
decide what a run is: simulation.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadtests.provenance import commit
from loadtests.sim.metrics import PolicyResult
from loadtests.sim.paired import verdicts_of
from loadtests.sim.simulation import SimulationPlan, prepare, run_policy
from loadtests.traces import Trace

SUMMED = ("requests", "failed", "preemptions")
# Cells that agree in these are the same simulation.
SAME_RUN = ("trace", "workers", "load", "blocks_per_worker", "gateways", "shared_ledger", "event_loss_ratio",
            "restart_storm", "copies_ahead", "workers_per_machine", "cores_per_machine", "seed", "seeds", "requests")
LOAD_BALANCED = 1.15   # the goal for hits counts where load without replication is below this


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace under one plan; the plan's seed is the first of `num_seeds`."""

    trace_name: str
    plan: SimulationPlan
    num_seeds: int


def run_cell(cell: Cell, load: Callable[[str, int], Trace], policies: Sequence[str],
             progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Every policy on every seed. `load` makes the trace of a seed."""
    by_seed: list[dict[str, dict[str, Any]]] = []
    plan = cell.plan
    for seed in range(plan.seed, plan.seed + cell.num_seeds):
        prepared = prepare(load(cell.trace_name, seed), replace(plan, seed=seed))
        results: dict[str, dict[str, Any]] = {}
        for policy in policies:
            results[policy] = run_policy(prepared, policy).as_dict()
            if progress is not None:
                progress(f"{cell.trace_name} {plan.num_workers} workers, load {plan.load}, capacity {plan.capacity}, "
                         f"seed {seed}: {policy}")
        by_seed.append(results)
    return cell_report(cell, by_seed, trace_name=prepared.trace.name, requests=len(prepared.trace.requests),
                       blocks_per_worker=prepared.settings.blocks_per_worker)


def cell_report(cell: Cell, by_seed: Sequence[dict[str, dict[str, Any]]], *, trace_name: str, requests: int,
                blocks_per_worker: int) -> dict[str, Any]:
    """Means and verdicts of a cell, from policy to result for each seed."""
    plan, policies = cell.plan, list(by_seed[0])
    return {"trace": trace_name, "workers": plan.num_workers, "load": plan.load, "capacity": plan.capacity,
            "capacities": [plan.capacity],
            "gateways": plan.num_gateways, "shared_ledger": plan.shared_ledger,
            "event_loss_ratio": plan.event_loss_ratio, "restart_storm": plan.restart_storm,
            "copies_ahead": plan.copies_ahead, "workers_per_machine": plan.workers_per_machine,
            "cores_per_machine": plan.cores_per_machine,
            "seed": plan.seed, "seeds": len(by_seed), "requests": requests, "blocks_per_worker": blocks_per_worker,
            "policies": [_mean_of([results[policy] for results in by_seed]) for policy in policies],
            "verdicts": verdicts_of(by_seed)}


def grid_report(cells: Sequence[dict[str, Any]], plan: SimulationPlan) -> dict[str, Any]:
    """`simulate --json` of more than one cell or seed."""
    return {"commit": commit(), "model": plan.model.name, "model_source": plan.model.source, "cells": distinct(cells)}


def distinct(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run once: no worker has a pool smaller than its longest request, so two capacities may be the same pool.
    The first of them stands for all, and names them in `capacities`."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for cell in cells:
        key = tuple(cell[name] for name in SAME_RUN)
        others = found[key]["capacities"] if key in found else []
        found[key] = {**found.get(key, cell), "capacities": [*others, *cell["capacities"]]}
    return list(found.values())


def _mean_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; requests and failures are sums. None where a seed has none."""
    rows: list[dict[str, Any]] = [PolicyResult(**result).as_dict() for result in results]
    return {key: value if isinstance(value, str) else _over_seeds(key, [row[key] for row in rows])
            for key, value in rows[0].items()}


def _over_seeds(key: str, values: Sequence[Any]) -> Any:
    if None in values:
        return None
    return sum(values) if key in SUMMED else sum(values) / len(values)
