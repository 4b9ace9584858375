"""Figures of a simulation in which nothing was measured: none, where a zero would be a claim."""

from __future__ import annotations

import re
from dataclasses import replace

from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.grid import Cell, cell_report, grid_report, run_cell
from loadtests.sim.grid_report import name_of, summary
from loadtests.sim.metrics import CacheBounds, mean, quantile, result_of
from loadtests.sim.policies import POLICIES
from loadtests.sim.report import as_table
from loadtests.sim.simulation import SimulationPlan, prepare, report_of
from tests.support.simulated import trace_of


def test_where_all_requests_failed_there_are_no_times() -> None:
    trace, plan = trace_of((1, 2, 3), (4, 5)), SimulationPlan(num_workers=1)
    cluster = Cluster(trace, ClusterSettings(num_workers=1, blocks_per_worker=1), POLICIES["headstart"])
    cluster.run()
    result = result_of(cluster, "headstart", CacheBounds(0.5, 0.5))
    assert (result.requests, result.failed) == (0, 2)
    assert {result.ttft_p50_s, result.ttft_max_s, result.ttft_mean_s, result.hit_token_ratio,
            result.request_p99_s} == {None}
    [line] = as_table(report_of(prepare(trace, plan), plan, [result])).splitlines()[-1:]
    assert line.split()[:6] == ["headstart", "-", "-", "-", "-", "-"]
    failed = result.as_dict()
    cell = cell_report(Cell("t", plan, 2), [{"headstart": failed, "random": failed}] * 2, trace_name="t", requests=2,
                       blocks_per_worker=1)
    assert (cell["verdicts"], cell["policies"][0]["ttft_p99_s"], cell["policies"][0]["failed"]) == ({}, None, 4)


def test_of_nothing_there_is_no_mean_and_no_quantile() -> None:
    assert (mean([]), quantile([], 0.5)) == (None, None)
    assert (mean([1.0, 3.0]), quantile([1.0, 3.0], 0.5), quantile([1.0, 3.0], 1.0)) == (2.0, 1.0, 3.0)


def test_pools_that_are_the_same_are_one_cell() -> None:
    trace = trace_of((1, 2, 3), (1, 2, 4), *((number,) for number in range(5, 60)))
    plans = [replace(SimulationPlan(num_workers=2, load=0.5), capacity=capacity) for capacity in (0.05, 0.2, 0.9)]
    policies = ["headstart", "least_load"]
    cells = [run_cell(Cell("t", plan, 2), lambda name, seed: trace, policies) for plan in plans]
    sizes = [cell["blocks_per_worker"] for cell in cells]
    assert sizes[0] == sizes[1] < sizes[2], "of the first two, the longest request decides"
    report = grid_report(cells, plans[0])
    assert report == grid_report(cells, plans[0]), "and nothing is added up by asking again"
    assert [cell["capacities"] for cell in report["cells"]] == [[0.05, 0.2], [0.9]]
    lines = summary(report)
    assert lines[0].startswith("2 cells. ")
    assert [sum(map(int, re.findall(r"(?:wins|%|loses) (\d+)", line))) for line in lines[1:4]] == [2, 2, 2]
    assert name_of(report["cells"][0]).endswith("50%/5%=20%")
