"""The gateway benchmark: what it asks, and what it makes of its figures."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import orjson
import pytest

from loadtests.bench import gateway as bench
from loadtests.bench.gateway_targets import DIRECT, OURS, Bench, Peers, Target
from loadtests.bench.relay_prompts import DISTINCT, LONG, NUM_GROUPS, SHORT, Shape, bodies


@pytest.mark.parametrize("shape", [SHORT, LONG, DISTINCT])
def test_bodies_have_their_size_and_never_repeat(shape: Shape) -> None:
    asked = bodies(shape, 40, seed=1) + bodies(shape, 40, seed=2) + bodies(shape, 40, stream=True, seed=1)

    assert len(set(asked)) == len(asked)
    assert all(abs(len(body) - shape.num_bytes) <= max(64, shape.num_bytes // 100) for body in asked)


@pytest.mark.parametrize("shape", [SHORT, LONG])
def test_all_but_the_last_message_is_the_groups(shape: Shape) -> None:
    one, other = bodies(shape, NUM_GROUPS + 1, seed=1), bodies(shape, NUM_GROUPS + 1, seed=2)
    beginnings = [orjson.loads(body)["messages"][:-1] for body in one]

    assert beginnings[0] == beginnings[NUM_GROUPS] != beginnings[1]
    assert beginnings == [orjson.loads(body)["messages"][:-1] for body in other]
    assert all(len(orjson.loads(body)["messages"][-1]["content"]) == shape.new_bytes for body in one)


def test_latencies_are_less_directs_of_the_same_round() -> None:
    direct, ours = Target(DIRECT, "", 1, 1, ""), Target(OURS, "abc", 2, 2, "")
    for without, with_gateway in ((100.0, 150.0), (1000.0, 1080.0), (100.0, 190.0)):
        direct.note("p50_us", without)
        ours.note("p50_us", with_gateway)
    ours.note("short_us", 7.0)

    rows = bench.summary([direct, ours])

    assert rows == [{"target": DIRECT, "version": "", "p50_us": 100.0},
                    {"target": OURS, "version": "abc", "p50_us": 80.0, "short_us": 7.0}]


def test_a_short_run_measures_ours_warm_and_says_why_a_peer_is_missing(tmp_path: Path) -> None:
    sizes = argparse.Namespace(only=["vllm-router"], rounds=1, requests=60, prompts=0)
    peers = Peers(vllm_router=str(tmp_path / "absent"))

    with Bench(tmp_path, peers, num_workers=1) as started:
        result = bench.run(sizes, started)

    _direct, ours = result["rows"]  # type: ignore[misc]
    assert set(ours) >= {"short_us", "long_us", "p50_us", "p99_us", "chunk_us"}  # type: ignore[operator]
    assert ours["short_us"] > 0  # type: ignore[index]
    assert "not on PATH" in result["skipped"]["vllm-router"]  # type: ignore[index]
    counted = result["counted"][OURS]  # type: ignore[index]
    assert counted["event_gaps"] == 0
    assert counted["predicted_hit_ratio"] > 0.5
    assert result["python"].startswith(platform.python_version())  # type: ignore[attr-defined]
