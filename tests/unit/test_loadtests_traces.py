"""Trace formats: what is read from each, and what a wrong file is told."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from loadtests.sim.metrics import cache_bounds
from loadtests.traces import TraceError, load_trace
from loadtests.workloads import WORKLOADS
from tests.support.simulated import TRACES, trace_of


@pytest.mark.parametrize(("name", "form", "block", "count"), [
    ("mooncake_small.jsonl", "mooncake", 512, 60), ("sessions_small.jsonl.gz", "sessions", 64, 24),
    ("lengths_small.jsonl", "lengths", 16, 12), ("conversations_small.jsonl", "conversations", 16, 9),
    ("questions_small.jsonl", "questions", 16, 6)])
def test_each_format_is_recognised_by_its_first_line(name: str, form: str, block: int, count: int) -> None:
    trace = load_trace(TRACES / name)
    assert (trace.format, trace.block_size, len(trace.requests)) == (form, block, count)
    arrivals = [request.at_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    for request in trace.requests:
        assert len(request.block_ids) == request.prompt_tokens // block or form == "sessions"
        assert len(request.block_ids) * block <= request.prompt_tokens


def test_mooncakes_times_are_spread_over_their_step_by_the_seed() -> None:
    one, same, other = (load_trace(TRACES / "mooncake_small.jsonl", seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert len({request.at_s for request in one.requests}) == 60


def test_a_smaller_block_shrinks_mooncakes_prompts_and_keeps_the_ids() -> None:
    whole, small = (load_trace(TRACES / "mooncake_small.jsonl", block_size=size) for size in (512, 16))
    by_ids = {request.block_ids for request in whole.requests}
    assert all(request.block_ids in by_ids or not request.block_ids for request in small.requests)
    assert max(r.prompt_tokens for r in small.requests) == max(r.prompt_tokens for r in whole.requests) * 16 // 512


def test_sessions_are_flat_and_their_ids_their_own() -> None:
    trace = load_trace(TRACES / "sessions_small.jsonl.gz")
    assert sum(request.prompt_tokens == 200 for request in trace.requests) == 4  # the sub-agents' requests
    by_session = {session: {block for r in trace.requests if r.session == session for block in r.block_ids}
                  for session in {request.session for request in trace.requests}}
    assert not set.intersection(*by_session.values())


def test_a_conversation_grows_by_what_was_said() -> None:
    trace = load_trace(TRACES / "conversations_small.jsonl")
    turns = [request for request in trace.requests if request.session == "c0"]
    assert [len(turn.block_ids) for turn in turns] == sorted(len(turn.block_ids) for turn in turns)
    assert turns[1].block_ids[:len(turns[0].block_ids)] == turns[0].block_ids
    first_of_others = next(request for request in trace.requests if request.session == "c1")
    assert first_of_others.block_ids[0] == turns[0].block_ids[0]


def test_a_conversation_without_a_name_is_one_of_its_own(tmp_path: Path) -> None:
    line = '{"messages":[{"role":"user","content":"%s"},{"role":"assistant","content":"yes"}]}\n'
    file = tmp_path / "nameless.jsonl"
    file.write_text(line % "one" + line % "two")
    requests = load_trace(file).requests
    assert len({request.session for request in requests}) == 2
    assert sorted(request.messages[0].text for request in requests) == ["one", "two"]
    assert [request.answer for request in requests] == ["yes", "yes"]


def test_rate_and_footprint() -> None:
    trace = trace_of((1, 2), (1, 2, 3), (2, 1), gap_s=5.0)
    assert trace.num_distinct_blocks() == 5
    faster = trace.at_rate(3.0)
    assert faster.span_s == pytest.approx(1.0)
    assert [r.block_ids for r in faster.requests] == [r.block_ids for r in trace.requests]


def test_equal_blocks_behind_different_ones_are_different() -> None:
    trace = trace_of((1, 2, 3), (4, 2, 3), (1, 2, 5), gap_s=1.0)
    assert trace.num_distinct_blocks() == 7
    first, other, third = trace.chains()
    assert not set(first) & set(other)
    assert (first[:2], first[2] != third[2]) == (third[:2], True)
    assert cache_bounds(trace, 100).infinite_ratio == pytest.approx(2 * 16 / (3 * 49))


MOONCAKE_LINE = b'{"timestamp": 1, "input_length": 600, "output_length": 9, "hash_ids": [1]}\n'


@pytest.mark.parametrize(("content", "says"), [
    (b"", "no lines"), (b"{\"a\": 1}\n", "no known format"), (b"nonsense\n", "not JSON"), (b"[1]\n", "JSON object"),
    (b"{\"timestamp\": 1, \"input_length\": \"many\", \"hash_ids\": []}\n", "jsonl:1: does not fit .* 'many'"),
    (MOONCAKE_LINE + b"\n{\"timestamp\": 2, \"input_length\": 9, \"hash_ids\": []}",
     "jsonl:3: .*'output_length' is missing"),
    (MOONCAKE_LINE + MOONCAKE_LINE + b"{}}", "jsonl:3: not JSON")])
def test_a_wrong_file_is_told_what_is_wrong(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        load_trace(path)


def test_a_broken_archive_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}")[:-6])
    with pytest.raises(TraceError):
        load_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_come_from_their_seed(name: str) -> None:
    one, same, other = WORKLOADS[name](64, 1), WORKLOADS[name](64, 1), WORKLOADS[name](64, 2)
    assert one == same
    assert one != other
    assert len(one.requests) == 64


def test_the_shapes_are_what_they_are_called() -> None:
    customers = {request.block_ids[0] for request in WORKLOADS["llm_d"](2000, 0).requests}
    assert len(customers) == 150
    hot = WORKLOADS["hot_prefix_25"](2000, 0).requests
    assert 0.2 < sum(len(request.block_ids) > 93 for request in hot) / 2000 < 0.3
    assert len({request.block_ids[0] for request in WORKLOADS["hot_prefix_100"](100, 0).requests}) == 1
    unshared = WORKLOADS["zero_sharing"](100, 0)
    assert unshared.num_distinct_blocks() == sum(len(request.block_ids) for request in unshared.requests)
