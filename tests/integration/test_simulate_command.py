"""`headstart simulate` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.sim.command import main
from tests.architecture.source_tree import ROOT
from tests.support.simulated import TRACES

TRACE = str(TRACES / "mooncake_small.jsonl")


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gateway.cli", "simulate", *arguments], cwd=ROOT, timeout=240,
                          capture_output=True, text=True, check=False)


def test_json_report_and_files(tmp_path: Path) -> None:
    done = simulate(TRACE, "--workers", "2", "--policy", "all", "--json", "--report", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"trace", "workers", "seed", "commit", "policies"} <= report.keys()
    keys = {"policy", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p95_s", "ttft_p99_s", "ttft_max_s",
            "hit_token_ratio", "ideal_hit_token_ratio", "max_mean_load", "requests"}
    assert len(report["policies"]) == 9
    assert all(keys <= policy.keys() for policy in report["policies"])
    assert report["policies"][0]["policy"] == "headstart"
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "headstart" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "ttft.png").stat().st_size > 0


def test_a_grid_is_one_report_with_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TRACE, "zero_sharing", "--requests", "24", "--workers", "1,2", "--load", "50,0.9", "--seeds", "2",
                 "--policy", "headstart,least_load", "--report", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(cell["trace"], cell["workers"], cell["load"]) for cell in report["cells"]] == [
        (trace, workers, load) for trace in ("mooncake_small", "zero_sharing") for workers in (1, 2)
        for load in (0.5, 0.9)]
    for cell in report["cells"]:
        assert [policy["policy"] for policy in cell["policies"]] == ["headstart", "least_load"]
        assert all(policy["requests"] == 48 for policy in cell["policies"])
        judged = cell["verdicts"]["ttft_p99_s"]
        assert judged["rival"] == "least_load"
        assert judged["low"] <= judged["ratio"] <= judged["high"]
    alone = report["cells"][0]["verdicts"]["ttft_p50_s"]
    assert (alone["ratio"], alone["outcome"], alone["sure"]) == (1.0, "within", False)  # one worker: no choice
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "wins" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "p99.png").stat().st_size > 0


def test_a_table_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TRACE, "--requests", "10", "--policy", "random,headstart", "--load", "recorded"]) == 0
    assert "of one cache" in capsys.readouterr().out


def test_the_traces_own_times_may_be_one_of_several_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TRACE, "--requests", "5", "--load", "recorded,80", "--json"]) == 0
    assert [cell["load"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [None, 0.8]


@pytest.mark.parametrize(("lines", "arguments", "says"), [
    ([(0, 10_000_000)], ["--workers", "64"], "smaller --capacity"),
    ([(0, 100), (200_000_000_000, 100)], ["--load", "recorded"], "give a higher --load")])
def test_what_would_eat_the_machine_is_refused(lines: list[tuple[int, int]], arguments: list[str], says: str,
                                               tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": at, "input_length": length, "output_length": 1}) + "\n"
                             for at, length in lines))
    with pytest.raises(SystemExit) as stopped:
        main([str(trace), *arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("arguments", "says"), [
    (["absent.jsonl"], "neither a file nor one of the workloads"), ([TRACE, "--policy", "fastest"], "unknown policy"),
    ([TRACE, "--policy", "all,fastest"], "unknown policy 'fastest'"),
    ([TRACE, "--shared-ledger"], "--shared-ledger is for several gateways"),
    ([TRACE, "--workers", "0"], "--workers"), ([TRACE, "--load", "-1"], "--load"),
    ([TRACE, "--load", "x"], "--load should be numbers"),
    ([TRACE, "--seeds", "0"], "--seeds"),
    ([TRACE, "--load", "nan"], "--load should be numbers"), ([TRACE, "--load", "80,inf"], "--load should be numbers"),
    ([TRACE, "--load", "1e-300"], "give a higher --load"),
    ([TRACE, "--capacity", "nan"], "--capacity should be numbers"), ([TRACE, "--capacity", "1e12"], "--capacity"),
    ([TRACE, "--event-delay", "nan"], "--event-delay"), ([TRACE, "--event-loss", "nan"], "--event-loss"),
    ([TRACE, "--workers", "1000000000"], "--workers"), ([TRACE, "--gateways", "1000000000"], "--gateways"),
    ([TRACE, "--block-size", "1000000000"], "--block-size"),
    (["llm_d", "--requests", "1000000000000"], "--requests"),
    ([TRACE, "--event-loss", "1"], "--event-loss"), ([TRACE, "--model", "gpt"], "unknown model"),
    ([TRACE, "--model", "http://127.0.0.1:9"], "GET /kv"),
    ([TRACE, "--model", "http://u:p@127.0.0.1:9"], "--model holds a user name or password"),
    ([TRACE, "--requests", "0"], "--requests")])
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], says: str,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
