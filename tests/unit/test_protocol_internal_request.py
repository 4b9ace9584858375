"""The internal request: round trips, and a 400 naming the header for every way it can be nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.api_error import ApiError
from worker.protocol.internal_request import (
    JSON_BYTES_HEADER,
    PROMPT_LENGTHS_HEADER,
    PROMPTS_MAX,
    RESUME_HEADER,
    SALT_FROM_HEADER,
    SALT_HEADER,
    TENANT_HEADER,
    InternalRequest,
    decode_internal,
    encode_internal,
    is_internal,
)

prompt = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)


@given(st.binary(max_size=40), st.lists(prompt, min_size=1, max_size=3),
       st.none() | st.text(st.characters(codec="utf-8"), max_size=20), st.none() | st.binary(min_size=1, max_size=64),
       st.integers(0, 2**31))
def test_round_trip(body: bytes, prompts: list[list[int]], tenant: str | None, salt: bytes | None,
                    start: int) -> None:
    headers, raw = encode_internal(body, prompts, tenant=tenant, salt=salt, salt_from=start)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    expected = InternalRequest(body, prompts, tenant, salt, start if salt is not None else 0)
    assert decode_internal(headers, raw) == expected


@pytest.mark.parametrize(("header", "value"), [
    (JSON_BYTES_HEADER, None), (JSON_BYTES_HEADER, ""), (JSON_BYTES_HEADER, "-1"), (JSON_BYTES_HEADER, "x"),
    (JSON_BYTES_HEADER, "1e3"), (JSON_BYTES_HEADER, "٣"), (JSON_BYTES_HEADER, "9" * 400),
    (PROMPT_LENGTHS_HEADER, None), (PROMPT_LENGTHS_HEADER, ""), (PROMPT_LENGTHS_HEADER, "2,"),
    (PROMPT_LENGTHS_HEADER, "2,1,0"), (PROMPT_LENGTHS_HEADER, "-2,5"), (PROMPT_LENGTHS_HEADER, "4"),
    (PROMPT_LENGTHS_HEADER, ",".join(["1"] * (PROMPTS_MAX + 1))),
    (SALT_HEADER, "zz"), (SALT_HEADER, ""), (SALT_HEADER, "00" * 65), (SALT_FROM_HEADER, "-1"),
    (TENANT_HEADER, "%ff"), (TENANT_HEADER, "a" * 257), (RESUME_HEADER, "{}")])
def test_nonsense_names_its_header(header: str, value: str | None) -> None:
    headers, body = encode_internal(b"{}", [[1, 2], [3]], tenant="t", salt=b"s", salt_from=4)
    if value is None:
        del headers[header]
    else:
        headers[header] = value
    with pytest.raises(ApiError) as caught:
        decode_internal(headers, body)
    assert caught.value.status == 400
    assert caught.value.param == header or (header, caught.value.param) == (JSON_BYTES_HEADER, PROMPT_LENGTHS_HEADER)


@pytest.mark.parametrize("cut", [0, 1, 5, 13])
def test_a_body_cut_short(cut: int) -> None:
    headers, body = encode_internal(b"{}", [[1, 2], [3]])
    with pytest.raises(ApiError):
        decode_internal(headers, body[:cut])
    with pytest.raises(ApiError):
        decode_internal(headers, body + b"x")


def test_is_internal() -> None:
    assert is_internal({"content-type": "Application/VND.headstart.v1; x=y"})
    assert not is_internal({"content-type": "application/json"})
    assert not is_internal({})
