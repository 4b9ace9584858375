"""Duplicate keys and depth against the standard library's parser, which sees every pair."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.prompt.json_body import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_KEYS,
    MAX_TOP_LEVEL_KEYS,
    _outside_of_strings,
    check_nesting,
    decode_body,
    top_level_keys,
)
from worker.protocol.api_error import ApiError


class _Anything(msgspec.Struct):
    """A body none of whose fields is known."""


_any_object = msgspec.json.Decoder(_Anything)

# Few keys and values that are prefixes of each other, so that duplicates and near misses are common.
keys = st.sampled_from(["a", "b", "", "é", "a\"b", "\\", "n", "\n", "{", "\":"])
values = st.recursive(
    st.sampled_from([1, 12, 123, 0, -1, 1.5, True, False, None, "", "a", "a\",\"a\":1", "\\", "}", "é🌦"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2), max_leaves=6)
spaces = st.sampled_from(["", " ", "\n\t ", "\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """The text of an object, written pair by pair, so that keys may repeat."""
    pairs = draw(st.lists(st.tuples(keys, values, spaces, st.booleans()), max_size=5))
    texts = [f"{space}{json.dumps(key, ensure_ascii=escape)}{space}:{space}{json.dumps(value)}{space}"
             for key, value, space, escape in pairs]
    return draw(spaces) + "{" + (",".join(texts) or draw(spaces)) + "}" + draw(spaces)


@settings(max_examples=500, deadline=None)
@given(bodies())
def test_duplicate_keys_are_found_and_named(body: str) -> None:
    pairs: list[list[str]] = []
    json.loads(body, object_pairs_hook=lambda found: pairs.append([key for key, _ in found]) or dict(found))
    expected = pairs[-1]  # the outermost object is finished last
    repeated = [key for key in expected if expected.count(key) > 1]
    if not repeated:
        assert top_level_keys(body.encode()) == expected
        return
    with pytest.raises(ApiError) as raised:
        top_level_keys(body.encode())
    assert raised.value.param in repeated


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=200, deadline=None)
@given(value=values, num_wrapped=st.integers(0, MAX_JSON_DEPTH + 3), siblings=st.integers(0, 5))
def test_depth_is_bounded_exactly(value: Any, num_wrapped: int, siblings: int) -> None:
    for index in range(num_wrapped):
        value = {"x]": value} if index % 2 else [value]
    value = [value, *([[]] * siblings * MAX_JSON_DEPTH)]
    body = json.dumps(value).encode()
    if depth(value) <= MAX_JSON_DEPTH:
        check_nesting(body)
        return
    with pytest.raises(ApiError, match="deeper"):
        check_nesting(body)


def test_the_deepest_body() -> None:
    check_nesting(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)
    check_nesting(b'{"[":' * MAX_JSON_DEPTH + b"0" + b"}" * MAX_JSON_DEPTH)
    with pytest.raises(ApiError, match="deeper than 64"):
        check_nesting(b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1))


def test_the_number_of_containers_is_bounded_exactly() -> None:
    text = "[" * 1_000_000  # brackets in a string are text
    body = {"prompt": text, "x": [[]] * (MAX_JSON_CONTAINERS - 2)}
    check_nesting(json.dumps(body).encode())
    body["x"] = [[]] * (MAX_JSON_CONTAINERS - 1)
    with pytest.raises(ApiError, match="more than 200000"):
        check_nesting(json.dumps(body).encode())


@settings(max_examples=200, deadline=None)
@given(value=values)
def test_what_is_outside_of_strings_is_found_however_they_are_escaped(value: Any) -> None:
    body = json.dumps({"x": value, "\\": '\\"[:', '":[': "\\\\"}).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
    for wanted in (b"[]{}", b":"):
        unwanted = bytes(set(range(256)) - set(wanted + b'"'))
        assert _outside_of_strings(body, unwanted, len(body)) == bytes(byte for byte in outside if byte in wanted)


def test_the_number_of_keys_is_bounded_exactly() -> None:
    body = {"prompt": ":" * 1_000_000, "x": dict.fromkeys(map(str, range(MAX_JSON_KEYS - 2)), 1)}
    assert decode_body(json.dumps(body).encode(), _any_object).value == _Anything()
    body["y"] = 1
    with pytest.raises(ApiError, match=f"more than {MAX_JSON_KEYS} keys"):
        decode_body(json.dumps(body).encode(), _any_object)
    with pytest.raises(ApiError, match=f"more than {MAX_TOP_LEVEL_KEYS} fields"):
        top_level_keys(json.dumps(dict.fromkeys(map(str, range(MAX_TOP_LEVEL_KEYS + 1)))).encode())
