"""Too long for every worker: the exact limit, and the bound that needs no tokenising."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.admission.cache_salt import NO_SALT
from gateway.server.prompt_limit import PromptLimit
from gateway.server.prompt_work import PromptTask, PromptWork
from tests.support.stub_worker import byte_bundle
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_completion
from worker.prompt.token_bound import NORMALIZER_SLACK, TokenBound, token_bound
from worker.protocol.api_error import ApiError


def changed(**changes: Any) -> bytes:
    return orjson.dumps({**orjson.loads(byte_bundle().tokenizer_json), **changes})


def test_the_bound_of_a_byte_tokenizer() -> None:
    assert token_bound(changed()) == TokenBound(1)
    assert token_bound(changed(normalizer={"type": "NFC"})) == TokenBound(NORMALIZER_SLACK)
    added = {"id": 256, "content": "<end>", "lstrip": False, "rstrip": False}
    assert token_bound(changed(added_tokens=[added])) == TokenBound(len("<end>"))


@pytest.mark.parametrize("changes", [
    {"normalizer": {"type": "Strip"}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "StripAccents"}]}},
    {"pre_tokenizer": {"type": "WhitespaceSplit"}}, {"pre_tokenizer": None},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}]}},
    {"added_tokens": [{"id": 256, "content": "<end>", "lstrip": False, "rstrip": True}]},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "normalizer": {"type": "NFC"}},
    {"model": {"type": "WordPiece", "vocab": {}}},
    {"model": None},
])
def test_where_text_could_vanish_there_is_no_bound(changes: dict[str, Any]) -> None:
    assert token_bound(changed(**changes)) is None


async def test_a_huge_text_is_refused_without_tokenising_it() -> None:
    renderer, work = PromptRenderer(byte_bundle()), PromptWork()
    text = b"word " * 4_000_000
    for request, param in ((parse_chat(b'{"model":"m","messages":[{"role":"user","content":"' + text + b'"}]}'),
                            "messages"), (parse_completion(b'{"model":"m","prompt":"' + text + b'"}'), "prompt")):
        with pytest.raises(ApiError) as refused:
            await work.prepare(PromptTask(renderer, request, len(text), [], lambda prompts: NO_SALT,
                                          limit=PromptLimit(4096, TokenBound(1), param)))
        assert (refused.value.status, refused.value.param) == (400, param)
        assert "at least 20000" in refused.value.message
        assert "4096" in refused.value.message
    work.close()
