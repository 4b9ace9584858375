"""The remembered end of a stream, however the stream was cut into chunks."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.sse import StreamTail, Usage, body_usage, error_event

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}


def event(payload: object) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


GOOD = (event({"choices": [{"delta": {"content": "hi [DONE] \"usage\""}}], "usage": None})
        + event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n")


def fed(chunks: list[bytes], limit_bytes: int = 65_536) -> StreamTail:
    tail = StreamTail(limit_bytes)
    for chunk in chunks:
        tail.feed(chunk)
    return tail


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted({point % (len(data) + 1) for point in points}), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


@given(st.lists(st.integers(0, 10_000)))
def test_cuts_change_nothing(points: list[int]) -> None:
    tail = fed(cut(GOOD, points))
    assert tail.ended_with_done()
    assert tail.stream_usage() == Usage(9, 4, 8)
    assert tail.at_event_border
    assert tail.total_bytes == len(GOOD)


@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000)))
def test_the_border_depends_on_the_bytes_and_not_on_the_cuts(data: bytes, points: list[int]) -> None:
    whole, parts = fed([data] if data else []), fed(cut(data, points))
    assert parts.at_event_border == whole.at_event_border
    assert parts.at_event_border == (not data or data.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")))


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1), st.integers(1, 64))
def test_memory_is_bounded_by_twice_the_limit_or_one_chunk_more(chunks: list[bytes], limit_bytes: int) -> None:
    tail = fed(chunks, limit_bytes)
    kept, whole = tail.tail(), b"".join(chunks)
    assert whole.endswith(kept)
    assert min(limit_bytes, len(whole)) <= len(kept) <= max(2 * limit_bytes, limit_bytes + max(map(len, chunks)))


@pytest.mark.parametrize(("end", "done"), [
    (b"data: [DONE]\n\n", True), (b"data:[DONE]\n\n", True), (b"data: [DONE]", True), (b"data: [DONE]\r\n\r\n", True),
    (b"data: [DONE]\n\n: keep-alive\n\n", True), (b"", False), (b"data: {}\n\n", False),
    (b"data: [DONE]\n\ndata: {}\n\n", False), (b'data: "[DONE]"\n\n', False), (b"event: [DONE]\n\n", False),
    (b"data: x [DONE]\n\n", False),
])
def test_only_a_last_done_line_ends_a_stream(end: bytes, done: bool) -> None:
    assert fed([b"data: {}\n\n", end] if end else [b"data: {}\n\n"]).ended_with_done() is done


PIECES = [b'data: {"usage":{"prompt_tokens":1}}', b'data: {"usage":null}', 
          b'data:{"usage":{"prompt_tokens":2}}', b"\n", b"\r",
          b": comment", b"data: [DONE]", b"data: [DONE]\n\n", b"x", b'"usage"']


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join), max_size=6))
def test_the_end_is_read_as_line_by_line(chunks: list[bytes]) -> None:
    lines = [line for line in b"".join(chunks).splitlines() if line and not line.startswith(b":")]
    tail = fed(chunks)
    assert tail.ended_with_done() == (bool(lines) and lines[-1] in (b"data: [DONE]", b"data:[DONE]"))
    found = [body_usage(line[5:].strip()) for line in lines if line.startswith(b"data:")]
    assert tail.stream_usage() == next((usage for usage in reversed(found) if usage is not None), None)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"usage":null}', b'{"usage":{}}', b'{"usage":3}',
                                  b'{"usage":{"prompt_tokens":"many"}}'])
def test_a_body_without_usage_has_none(body: bytes) -> None:
    assert body_usage(body) is None


def test_an_engine_that_does_not_report_hits_reports_none_rather_than_zero() -> None:
    assert body_usage(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}') == Usage(3, 1, None)


def test_an_error_event_stands_alone_even_after_half_an_event() -> None:
    lines = (b'data: {"half' + error_event(b'{"error":{}}')).split(b"\n\n")
    assert lines[1] == b'event: error\ndata: {"error":{}}'
