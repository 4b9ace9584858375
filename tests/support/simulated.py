"""Small simulations: the traces of tests/support/traces, and one run as a value to compare."""

from __future__ import annotations

from pathlib import Path

from loadtests.sim.cluster import Cluster
from loadtests.sim.policies import POLICIES
from loadtests.sim.simulation import Prepared, SimulationPlan, prepare
from loadtests.traces import Trace, TraceRequest

TRACES = Path(__file__).parent / "traces"


def trace_of(*prompts: tuple[int, ...], block_size: int = 16, gap_s: float = 1.0, output_tokens: int = 4) -> Trace:
    """A request for each tuple of block ids, `gap_s` apart, one token behind the last full block."""
    return Trace("small", "synthetic", block_size, tuple(
        TraceRequest(gap_s * index, len(ids) * block_size + 1, output_tokens, ids)
        for index, ids in enumerate(prompts)))


def finished(trace: Trace, plan: SimulationPlan, policy: str = "headstart") -> Cluster:
    """A cluster that has run `trace` to its end."""
    return run(prepare(trace, plan), policy)


def run(prepared: Prepared, policy: str) -> Cluster:
    cluster = Cluster(prepared.trace, prepared.settings, POLICIES[policy])
    cluster.run()
    return cluster


def story(cluster: Cluster) -> list[tuple[object, ...]]:
    """What happened to each request, to the last bit."""
    return [(request.worker_id, request.first_token_at, request.ended_at, request.cached_tokens,
             request.predicted_tokens) for request in cluster.requests]
