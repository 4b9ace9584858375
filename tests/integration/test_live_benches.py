"""`make bench-live` and `make bench-agreement` end to end, as small as they can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT

SMALL = ("--workers", "2", "--rounds", "1", "--hidden", "32", "--layers", "1")

pytestmark = pytest.mark.slow


def bench(name: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-m", f"loadtests.bench.{name}", *SMALL, *arguments, "--out", str(out)],
                          cwd=ROOT, timeout=280, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(out.read_text()))


def test_every_arm_is_sent_the_same_and_predicted_hits_are_found(tmp_path: Path) -> None:
    report = bench("live", tmp_path, "--span", "3", "--warm-up", "0", "--kv-memory", "1500KiB", "--arms",
                   "headstart,round_robin,sglang-router", "--sglang-router", "no-such-router")
    assert "no-such-router" in report["left_out"]["sglang-router"]
    ours, turns = report["arms"]
    assert (ours["policy"], turns["policy"]) == ("headstart", "round_robin")
    assert ours["requests"] + ours["failed"] == turns["requests"] + turns["failed"] > 0
    assert ours["predicted_hits"]["compared"] == ours["requests"] > 0
    assert ours["hit_token_ratio"] > 0


def test_the_simulator_finds_the_hits_that_live_workers_find(tmp_path: Path) -> None:
    report = bench("agreement", tmp_path, "--requests", "30", "--load", "0.1", "--kv-memory", "8MiB",
                   "--trace", str(ROOT / "loadtests" / "excerpts" / "mooncake_400.jsonl.gz"))
    compared, = report["traces"]
    assert compared["live_rounds"][0]["requests"] == compared["simulated_rounds"][0]["requests"] == 30
    assert abs(compared["error_ratio"]["hit_token_ratio"]) < 0.3
