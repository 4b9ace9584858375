"""One simulation: a trace, a share of saturation, a capacity, some policies; the report that `simulate` prints.

Owns how a plan becomes a cluster, and what makes a run reproducible (trace, seed, commit). It must never print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.provenance import commit
from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.cost_model import DEFAULT_MODEL, MODELS, CostModel
from loadtests.sim.metrics import CacheBounds, PolicyResult, cache_bounds, result_of, saturation_rate
from loadtests.sim.paired import verdicts_of
from loadtests.sim.policies import POLICIES
from loadtests.traces import Trace

HEADROOM_BLOCKS = 2   # beside the longest sequence, the least a worker has
POOL_BLOCKS_MAX = 20_000_000   # of all workers: above a gigabyte of counts and lists
WORKER_SECONDS_MAX = 20_000_000.0   # simulated: gateways look at each worker every second, busy or not


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """`load` is a share of saturation (None: the trace's own times), `capacity` a share of the trace's footprint for
    all workers together."""

    num_workers: int = 8
    load: float | None = 0.8
    capacity: float = 0.2
    model: CostModel = MODELS[DEFAULT_MODEL]
    seed: int = 0
    num_gateways: int = 1
    event_delay_s: float = 0.002
    event_loss_ratio: float = 0.0
    coalesce: bool = True
    shared_ledger: bool = False
    restart_storm: bool = False
    copies_ahead: bool = True
    workers_per_machine: int = 1
    cores_per_machine: int = 1

    @property
    def at_work_max(self) -> float:
        """So many workers' work is done at a time, where others wait for a core."""
        return self.num_workers * min(1.0, self.cores_per_machine / self.workers_per_machine)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A trace at its rate, the cluster's settings, and the yardsticks. `commit` is that of the code which was loaded:
    asked before a long run, since the tree may move on meanwhile."""

    trace: Trace
    settings: ClusterSettings
    bounds: CacheBounds
    commit: str


def prepare(trace: Trace, plan: SimulationPlan) -> Prepared:
    """The same for every policy."""
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    share = plan.capacity * trace.num_distinct_blocks() / plan.num_workers
    per_worker = max(int(share), -(-longest // trace.block_size) + HEADROOM_BLOCKS)
    if per_worker * plan.num_workers > POOL_BLOCKS_MAX:
        raise ValueError(f"{plan.num_workers} workers of {per_worker} blocks each are more than the "
                         f"{POOL_BLOCKS_MAX} blocks that can be simulated: give a smaller --capacity, fewer "
                         f"--workers, or leave out the longest request, of {longest} tokens")
    bounds = cache_bounds(trace, per_worker * plan.num_workers)
    if plan.load is not None:
        saturation = saturation_rate(trace, plan.model, num_workers=plan.at_work_max,
                                     tokens_per_worker=per_worker * trace.block_size,
                                     hit_ratio=bounds.one_cache_ratio)
        trace = trace.at_rate(plan.load * saturation)
    if not trace.span_s * plan.num_workers <= WORKER_SECONDS_MAX:   # nor nan, of a rate that is nearly none
        raise ValueError(f"{plan.num_workers} workers for {trace.span_s:.0f} s are more than the "
                         f"{WORKER_SECONDS_MAX:.0f} worker-seconds that can be simulated: give a higher --load, or "
                         "fewer --requests or --workers")
    settings = ClusterSettings(num_workers=plan.num_workers, blocks_per_worker=per_worker, model=plan.model,
                               num_gateways=plan.num_gateways, seed=plan.seed, event_delay_s=plan.event_delay_s,
                               event_loss_ratio=plan.event_loss_ratio, coalesce=plan.coalesce,
                               shared_ledger=plan.shared_ledger, restart_storm=plan.restart_storm,
                               copies_ahead=plan.copies_ahead, workers_per_machine=plan.workers_per_machine,
                               cores_per_machine=plan.cores_per_machine)
    return Prepared(trace, settings, bounds, commit())


def run_policy(prepared: Prepared, policy: str,
               progress: Callable[[int, int], None] | None = None) -> PolicyResult:
    """One policy on a fresh cluster."""
    cluster = Cluster(prepared.trace, prepared.settings, POLICIES[policy])
    cluster.run(progress)
    return result_of(cluster, policy, prepared.bounds)


def report_of(prepared: Prepared, plan: SimulationPlan, results: Sequence[PolicyResult]) -> dict[str, Any]:
    """`simulate --json`. No clock, so equal inputs give equal bytes."""
    trace, settings = prepared.trace, prepared.settings
    return {"trace": trace.name, "format": trace.format, "block_size": trace.block_size, "workers": plan.num_workers,
            "seed": plan.seed, "commit": prepared.commit, "load": plan.load, "capacity": plan.capacity,
            "rate_per_s": len(trace.requests) / trace.span_s if trace.span_s else 0.0,
            "blocks_per_worker": settings.blocks_per_worker, "model": plan.model.name,
            "model_source": plan.model.source, "gateways": plan.num_gateways,
            "event_delay_s": plan.event_delay_s, "event_loss_ratio": plan.event_loss_ratio,
            "shared_ledger": plan.shared_ledger, "restart_storm": plan.restart_storm,
            "copies_ahead": plan.copies_ahead, "workers_per_machine": plan.workers_per_machine,
            "cores_per_machine": plan.cores_per_machine,
            "policies": [result.as_dict() for result in results],
            "verdicts": verdicts_of([{result.policy: result.as_dict() for result in results}])}


