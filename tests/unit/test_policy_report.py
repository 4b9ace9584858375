"""A report that can be stopped: what was run is kept, what is missing is run, equal runs are run once."""

from __future__ import annotations

import time
from pathlib import Path

import orjson

from loadtests.policy_report import LOADS_AND_CAPACITIES, Job, Report
from loadtests.sim.run_store import RunStore, key_of
from loadtests.sim.simulation import SimulationPlan

POLICIES = ["headstart", "least_load"]
SMALL = Job("zero_sharing", 12, num_workers=2)
FOREVER = time.time() + 1e9


def lines(folder: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in (folder / "runs.jsonl").read_bytes().splitlines()]


def test_a_store_keeps_the_last_run_of_a_key_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    keys = [key_of("w", 5, SimulationPlan(seed=seed), policy) for seed in (1, 2) for policy in ("a", "b")]
    store = RunStore(path)
    assert store.get(keys[0]) is None
    for number, key in enumerate(keys):
        store.put(key, {"number": number}, f"commit {key[-1]}")
    store.put(keys[0], {"number": 9}, "later")
    again = RunStore(path)
    assert [again.get(key) for key in keys] == [{"number": number} for number in (9, 1, 2, 3)]
    assert again.commits("a") == ["commit a", "later"]
    again.forget({"b"})
    assert [again.get(key) is None for key in keys] == [False, True, False, True]


def test_a_report_goes_on_where_it_stopped(tmp_path: Path) -> None:
    Report(tmp_path, tmp_path, POLICIES, [SMALL]).fill([1, 2], until=0.0)
    assert not (tmp_path / "runs.jsonl").exists(), "no run begins after the end"
    Report(tmp_path, tmp_path, ["least_load"], [SMALL]).fill([1, 2], FOREVER)
    assert len(lines(tmp_path)) == 2 * len(LOADS_AND_CAPACITIES)
    report = Report(tmp_path, tmp_path, POLICIES, [SMALL])
    assert report.cells([1, 2], POLICIES) == [], "one of the policies is missing"
    report.fill([1], FOREVER)
    cells = report.cells([1, 2], POLICIES)
    assert [(cell["seeds"], cell["trace"], len(cell["policies"])) for cell in cells] == [
        (1, "zero_sharing", 2)] * len(LOADS_AND_CAPACITIES)
    assert len(lines(tmp_path)) == 3 * len(LOADS_AND_CAPACITIES)
    report.fill([1], FOREVER)
    assert len(lines(tmp_path)) == 3 * len(LOADS_AND_CAPACITIES), "nothing is run twice"
    assert set(report.write([1], POLICIES)["commits"]) == set(POLICIES)
    distinct = {(cell["load"], cell["blocks_per_worker"]) for cell in cells}
    assert (tmp_path / "table.md").read_text().count("| zero_sharing") == len(distinct) < len(LOADS_AND_CAPACITIES)


def test_a_pool_as_small_as_the_longest_request_is_simulated_once(tmp_path: Path) -> None:
    report = Report(tmp_path, tmp_path, ["least_load"], [SMALL])
    report.fill([1], FOREVER)
    by_size: dict[tuple[object, object], set[object]] = {}
    for row in lines(tmp_path):
        result, key = row["result"], row["key"]
        assert isinstance(result, dict)
        assert isinstance(key, list)
        by_size.setdefault((key[3], result["blocks_per_worker"]), set()).add(result["run"]["ttft_mean_s"])
    assert all(len(means) == 1 for means in by_size.values())
