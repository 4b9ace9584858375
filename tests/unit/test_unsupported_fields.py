"""What would change the answer is refused by name; what is null, usual or merely unknown passes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from worker.prompt.requests import parse_chat
from worker.prompt.unsupported_fields import refuse_unsupported_fields
from worker.protocol.api_error import ApiError


def look_at(**fields: Any) -> None:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    refuse_unsupported_fields(body, parse_chat(body).unknown)


@pytest.mark.parametrize(("name", "value"), [
    ("guided_json", {"type": "object"}), ("guided_regex", "a+"), ("structured_outputs", {}), ("best_of", 2),
    ("best_of", "x"), ("echo", True), ("echo", 0), ("stop_token_ids", [1]), ("skip_special_tokens", False),
    ("modalities", ["text", "audio"])])
def test_a_field_that_would_change_the_answer_is_named(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name} is not supported: ") as refused:
        look_at(store=True, **{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("fields", [
    {}, {"guided_json": None}, {"best_of": 1}, {"echo": False}, {"stop_token_ids": []}, {"skip_special_tokens": True},
    {"modalities": ["text"]}, {"metadata": {"guided_json": 1}, "store": True, "reasoning_effort": "low"}])
def test_what_happens_anyway_passes(fields: dict[str, Any]) -> None:
    look_at(**fields)
