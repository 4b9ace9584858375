"""Too long for every worker: the exact limit, and the bound that needs no tokenising."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from gateway.admission.cache_salt import NO_SALT
from gateway.knowledge.token_bound import NORMALIZER_SLACK, TokenBound, token_bound
from gateway.server.prompt_limit import PromptLimit
from gateway.server.prompt_work import PromptTask, PromptWork
from tests.support.reference_tokenizers import renderer_of
from tests.support.stub_worker import byte_bundle
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_completion
from worker.protocol.api_error import ApiError

TEXTS = ["x" * 5000, " " * 5000, "\n" * 5000, "-" * 5000, "=" * 5000, "\U0001d400" * 2000, "e\u0301" * 2000,
         "\u1100\u1161\u11a8" * 2000, "<|im_end|>" * 500, "\u00e9\u4e2d\U0001f600\x00" * 500,
         "\x06" * 3000 + "\U000c8000" * 3000]


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "llama3_1", "gemma3"])
def test_no_text_has_fewer_tokens_than_the_bound(family: str) -> None:
    renderer = renderer_of(family)
    bound = token_bound(renderer.bundle.tokenizer_json)
    assert bound is not None
    for text in TEXTS:
        num_tokens = len(renderer.tokenizer.encode(text, add_special_tokens=False))
        assert num_tokens >= bound.tokens_min(text), text[:20]


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
    began_at = time.perf_counter()
    for request, param in ((parse_chat(b'{"model":"m","messages":[{"role":"user","content":"' + text + b'"}]}'),
                            "messages"), (parse_completion(b'{"model":"m","prompt":"' + text + b'"}'), "prompt")):
        with pytest.raises(ApiError) as refused:
            await work.prepare(PromptTask(renderer, request, len(text), [], lambda prompts: NO_SALT,
                                          limit=PromptLimit(4096, TokenBound(1), param)))
        assert (refused.value.status, refused.value.param) == (400, param)
        assert "at least 20000" in refused.value.message
        assert "4096" in refused.value.message
    assert time.perf_counter() - began_at < 2.0
    work.close()
