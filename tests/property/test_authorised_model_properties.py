"""The model that was authorised is the model that is forwarded, however the body spells it."""

from __future__ import annotations

import json

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.cache_salt import with_cache_salt
from gateway.admission.tenants import Tenant
from worker.prompt.requests import CompletionRequest, parse_completion
from worker.protocol.api_error import ApiError
from worker.protocol.internal_request import decode_internal, encode_internal

TENANT = Tenant("t", b"t", frozenset({"good"}))
# The same key in every spelling that JSON has for it, and keys that only look like it.
KEYS = st.sampled_from(['"model"', '"m\\u006fdel"', '"\\u006d\\u006F\\u0064\\u0065\\u006c"', '"Model"', '"model "',
                        '"model\\u0000"', '"mod\\/el"', '"x"', '"cache_salt"', '"cache\\u005fsalt"'])
VALUES = st.sampled_from(['"good"', '"evil"', '"g\\u006fod"', '"go\\u006fd"', '"good "', "null", "1", '["good"]',
                          '{"model":"evil"}', '"\\"model\\":\\"evil\\""', '"good\\u0000"'])
GAPS = st.sampled_from(["", " ", "\n", "\t\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    fields = draw(st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=5))
    fields.insert(draw(st.integers(0, len(fields))), ('"prompt"', '"hi"'))
    gap = draw(GAPS)
    text = ",".join(f"{gap}{key}{gap}:{gap}{value}" for key, value in fields)
    return (gap + "{" + text + gap + "}").encode()


def every_reading(body: bytes) -> set[str]:
    """The model as readers that keep the last key see it, and as one that keeps the first does."""
    first = dict(reversed(json.loads(body, object_pairs_hook=list)))
    readings = (json.loads(body), orjson.loads(body), msgspec.json.decode(body), first)
    return {json.dumps(reading.get("model")) for reading in readings}


def parsed_and_allowed(body: bytes) -> CompletionRequest | None:
    """The request, or None when it was refused."""
    try:
        parsed = parse_completion(body)
        TENANT.check_model(parsed.model)
    except ApiError:
        return None
    return parsed


@settings(max_examples=400)
@given(bodies())
def test_what_is_authorised_is_what_every_reader_finds(body: bytes) -> None:
    parsed = parsed_and_allowed(body)
    if parsed is None:
        return
    assert parsed.model == "good"
    salted = with_cache_salt(body, "00ff")
    internal = decode_internal(*encode_internal(body, [[1]]))
    for forwarded in (body, salted, internal.json_body):
        assert every_reading(forwarded) == {'"good"'}
        assert parse_completion(forwarded).model == "good"
    assert parse_completion(salted).cache_salt == "00ff"


@settings(max_examples=200)
@given(bodies(), st.permutations(["good", "evil"]))
def test_two_models_are_none(body: bytes, models: list[str]) -> None:
    first, second = ((f'"model":"{model}",').encode() for model in models)
    at = body.index(b"{") + 1
    for doubled in (body[:at] + first + second + body[at:], body[:at] + first + first + body[at:]):
        with pytest.raises(ApiError) as refused:
            parse_completion(doubled)
        assert refused.value.status == 400
