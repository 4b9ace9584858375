"""A cost model from runs: the simulator stands for the live workers, whose model is to be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.cost_model import CostModel
from loadtests.sim.fit import Fit
from loadtests.sim.policies import POLICIES
from loadtests.sim.run_fit import AsSeen, Run, Seen, fit_to_runs
from loadtests.sim.shared_cores import OthersWork
from loadtests.traces import Trace
from loadtests.workloads import WORKLOADS

TRUE = CostModel("true", "", floor_s=4e-3, weights_s=0.0, token_s=8e-5, pair_s=6e-9, context_s=5e-7, row_s=8e-4,
                 max_batch_tokens=512, max_running=64)
WRONG = replace(TRUE, floor_s=8e-3, token_s=3e-5, pair_s=2e-9, context_s=2e-7, row_s=1e-4)
REQUEST_S = 8e-3
OTHERS = OthersWork(request_s=5e-3, token_s=5e-4, other_programs=(0.2, 0.0, 0.1) * 40)
SETTINGS = ClusterSettings(num_workers=2, blocks_per_worker=4096, workers_per_machine=2, cores_per_machine=2)


def trace(seed: int, output_tokens: int) -> Trace:
    whole = WORKLOADS["tenants"](60, seed)
    requests = tuple(replace(request, output_tokens=output_tokens) for request in whole.requests)
    return replace(whole, requests=requests).at_rate(4.0)


def run_of(one: Trace, model: CostModel, request_s: float) -> Cluster:
    cluster = Cluster(one, replace(SETTINGS, model=model, network_s=request_s / 2, others_work=OTHERS,
                                   copies_ahead=False), POLICIES["headstart"])
    cluster.run()
    return cluster


def as_run(cluster: Cluster, one: Trace) -> Run:
    return Run(one, [Seen(int(request.worker_id[1:]), request.first_token_at - request.arrives_at,
                          request.ended_at - request.arrives_at) for request in cluster.requests
                     if request.first_token_at is not None and request.ended_at is not None], OTHERS)


def waits(cluster: Cluster) -> list[float]:
    return sorted(request.first_token_at - request.arrives_at for request in cluster.requests
                  if request.first_token_at is not None)


def test_the_model_found_predicts_requests_that_it_was_not_fitted_to() -> None:
    learnt = [as_run(run_of(one, TRUE, REQUEST_S), one) for one in (trace(1, 16), trace(1, 2), trace(2, 16))]
    found = fit_to_runs(learnt, Fit(WRONG, 1e-3, 0.0, 0), SETTINGS)
    true, predicted, before = (waits(run_of(trace(7, 16), model, request_s)) for model, request_s in
                               ((TRUE, REQUEST_S), (found.model, found.request_s), (WRONG, 1e-3)))
    assert sum(predicted) == pytest.approx(sum(true), rel=0.05)
    assert predicted[30] == pytest.approx(true[30], rel=0.08)
    assert abs(sum(before) / sum(true) - 1) > 0.3, "it had something to find"
    assert found.mean_error_ratio < 0.1


def test_a_model_that_is_right_stays() -> None:
    one = trace(3, 16)
    found = fit_to_runs([as_run(run_of(one, TRUE, REQUEST_S), one)], Fit(TRUE, REQUEST_S, 0.0, 0), SETTINGS)
    assert found.model.step_s(512, 131_328, 4, 2000) == pytest.approx(TRUE.step_s(512, 131_328, 4, 2000), rel=1e-6)


def test_every_request_goes_where_it_went() -> None:
    one = trace(4, 2)
    seen = [Seen(index % 2, 1.0, 1.0) for index in range(len(one.requests))]
    cluster = Cluster(one, SETTINGS, lambda: AsSeen(seen))
    cluster.run()
    assert [request.worker_id for request in cluster.requests] == [f"w{each.worker:04d}" for each in seen]
