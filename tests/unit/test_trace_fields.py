"""What may stand in a trace's line: the limits, and what whoever breaks one is told."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.trace_fields import BLOCK_ID_MAX, OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, SUBAGENTS_DEEP_MAX
from loadtests.traces import Trace, TraceError, load_trace

MOONCAKE = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
LENGTHS = {"timestamp": 0, "input_length": 1000, "output_length": 5}
ASKED = {"t": 0, "in": 1000, "out": 5, "runs": [[0, 16]]}
SESSION = {"id": "a", "block_size": 64, "requests": [ASKED]}
SAID = {"role": "user", "content": "hi"}
TALK = {"id": "a", "messages": [SAID, {"role": "assistant", "content": "yes"}]}
QUESTION = {"turns": ["hi"]}


def session(**changes: object) -> dict[str, object]:
    return {**SESSION, "requests": [{**ASKED, **changes}]}


def talk(*messages: object) -> dict[str, object]:
    return {**TALK, "messages": [*messages, {"role": "assistant", "content": "yes"}]}


def nested(deep: int) -> dict[str, Any]:
    return ASKED if not deep else {"type": "subagent", "t": 0, "requests": [nested(deep - 1)]}


def loaded(path: Path, *lines: dict[str, object], block_size: int | None = None) -> Trace:
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    return load_trace(path, block_size=block_size)


LENGTHS_WRONG = (0, -5, True, 1024.5, "1024", None, PROMPT_TOKENS_MAX + 1, 10**12, 1 << 63)
BAD = [
    *(({**whole, "input_length": value}, "input_length should be a whole number from 1")
      for value in LENGTHS_WRONG for whole in (MOONCAKE, LENGTHS)),
    *((session(**{"in": value}), "in should be a whole number from 1") for value in LENGTHS_WRONG),
    *(({**MOONCAKE, "output_length": value}, "output_length should be a whole number from 0")
      for value in (-3, True, "x", OUTPUT_TOKENS_MAX + 1)),
    *(({**LENGTHS, "timestamp": value}, "timestamp should be a finite number") for value in ("abc", None, True, [])),
    *(({**MOONCAKE, "hash_ids": value}, "hash_ids should be a list")
      for value in (None, {"a": 1}, "ab", [True, False], ["a", "b"], [1.5, 2], [-1, 2], [[1], [2]], [1e40, 2])),
    *(({**MOONCAKE, "hash_ids": value}, "hash_ids should have 1 or 2 ids") for value in ([], [1, 2, 3])),
    *((session(runs=value), "runs should be a list")
      for value in ("x", None, [[5, 0]], [[-3, 2]], [[1]], [1], [["a", 1]], [[BLOCK_ID_MAX, 16]])),
    *((session(runs=value), "runs should have 15 or 16 ids") for value in ([], [[0, 17]], [[0, 10**9]])),
    *((session(t=value), "t should be") for value in ("x", -1, 1e30)),
    *(({**SESSION, "block_size": value}, "block_size should be a whole number from 1") for value in (0, -1, "a")),
    ({**SESSION, "block_size": 32}, "block_size should be that of the lines before, 64"),
    ({**SESSION, "requests": [5]}, "requests should be a list of objects"),
    ({**SESSION, "requests": [nested(SUBAGENTS_DEEP_MAX + 2)]}, "nested"),
    *((talk(value), "messages should be a list of objects") for value in (5, None, "hi")),
    *((talk({"role": "user", "content": value}), "content should be text") for value in (5, {"a": 1}, True)),
    (talk({"role": 5, "content": "hi"}), "role should be text"), (talk({"content": "hi"}), "'role' is missing"),
    (talk({"role": "user", "content": "hi", "tool_calls": 5}), "tool_calls should be a list"),
    *(({"turns": [value]}, "turns should be text") for value in (1, None, ["a"]))]


@pytest.mark.parametrize(("line", "says"), BAD)
def test_what_may_not_stand_there_is_named_with_its_line(line: dict[str, object], says: str, tmp_path: Path) -> None:
    good = next(one for one in (MOONCAKE, SESSION, TALK, QUESTION, LENGTHS) if set(one) & set(line) - {"id"}
                and ("hash_ids" in one) == ("hash_ids" in line))
    with pytest.raises(TraceError) as raised:
        loaded(tmp_path / "t.jsonl", good, line)
    assert "t.jsonl:2: does not fit the format" in str(raised.value)
    assert says in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_time_far_from_the_first_lines_is_named(tmp_path: Path) -> None:
    for first, second in ((0, 1e30), (1e30, 0), (0, -1e12)):
        with pytest.raises(TraceError, match=r"t.jsonl:2: .*timestamp should be within 3650 days of the first"):
            loaded(tmp_path / "t.jsonl", {**LENGTHS, "timestamp": first}, {**LENGTHS, "timestamp": second})
    epoch_ms = 1_700_000_000_000
    trace = loaded(tmp_path / "t.jsonl", {**LENGTHS, "timestamp": epoch_ms}, {**LENGTHS, "timestamp": epoch_ms + 500})
    assert trace.span_s == pytest.approx(0.5)


def test_the_limits_themselves_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ids = [0, BLOCK_ID_MAX]
    for num_ids in (1, 2):   # the block that is not full may have an id
        assert loaded(path, {**MOONCAKE, "hash_ids": ids[:num_ids]}).requests[0].block_ids == (0,)
    [largest] = loaded(path, {**LENGTHS, "input_length": PROMPT_TOKENS_MAX, "output_length": OUTPUT_TOKENS_MAX},
                       block_size=1 << 16).requests
    assert (largest.prompt_tokens, largest.output_tokens) == (PROMPT_TOKENS_MAX, OUTPUT_TOKENS_MAX)
    assert loaded(path, {**LENGTHS, "output_length": 0}).requests[0].output_tokens == 1
    assert len(loaded(path, {**SESSION, "requests": [nested(SUBAGENTS_DEEP_MAX)]}).requests) == 1
    assert loaded(path, talk({"role": "user", "content": None}, {"role": "user", "content": [{"type": "text"}]}))


def test_lines_with_blocks_of_their_own_are_scaled_when_told_to(tmp_path: Path) -> None:
    other = {"id": "b", "block_size": 128, "requests": [{**ASKED, "runs": [[0, 8]]}]}
    lengths = [one.prompt_tokens for one in loaded(tmp_path / "t.jsonl", SESSION, other, block_size=32).requests]
    assert sorted(lengths) == [ASKED["in"] // 4, ASKED["in"] // 2]


def test_a_block_size_that_makes_a_prompt_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="with --block-size 65536 this prompt has 12800000 tokens"):
        loaded(tmp_path / "t.jsonl", {**MOONCAKE, "input_length": 100_000, "hash_ids": list(range(196))},
               block_size=1 << 16)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + orjson.dumps(MOONCAKE))
    assert len(load_trace(path).requests) == 1


@pytest.mark.parametrize(("name", "content", "says"), [
    ("t.jsonl.gz", orjson.dumps(MOONCAKE), "name it .jsonl"),
    ("t.jsonl", b"\x1f\x8b\x08\x00rest", "name it .jsonl.gz"),
    ("t.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff\xff", "t.jsonl.gz")])
def test_a_false_archive_is_named_with_a_remedy(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says):
        load_trace(tmp_path / name)


ANYTHING = st.recursive(st.none() | st.booleans() | st.integers(-2, 1 << 63) | st.floats(allow_nan=False) | st.text(),
                        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
                        max_leaves=5)


@given(st.sampled_from([MOONCAKE, LENGTHS, SESSION, ASKED, TALK, SAID, QUESTION]), st.data(), ANYTHING)
def test_whatever_stands_in_a_field_it_is_a_trace_within_the_limits_or_an_error(
        whole: dict[str, Any], data: st.DataObject, value: object) -> None:
    line: dict[str, object] = {**whole, data.draw(st.sampled_from(sorted(whole))): value}
    if "in" in whole:
        line = {**SESSION, "requests": [line]}
    if "role" in whole:
        line = talk(line)
    with tempfile.TemporaryDirectory() as folder:
        try:
            trace = loaded(Path(folder) / "t.jsonl", line)
        except TraceError:
            return
    for request in trace.requests:
        assert 1 <= request.prompt_tokens <= PROMPT_TOKENS_MAX
        assert 1 <= request.output_tokens <= OUTPUT_TOKENS_MAX
        assert len(request.block_ids) == request.prompt_tokens // trace.block_size
        assert all(type(block) is int for block in request.block_ids)
