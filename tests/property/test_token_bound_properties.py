"""No text has fewer tokens than its bytes say, for every tokenizer at hand and for texts made of what melts best."""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.support.reference_tokenizers import FAMILIES, renderer_of
from tests.support.stub_worker import byte_bundle
from tests.support.tiny_tokenizer import tiny_tokenizer
from worker.prompt.token_bound import CHUNK_CHARS, TokenBound, token_bound
from worker.prompt.token_weights import weights_of_tokens
from worker.prompt.tokenizer import PromptTokenizer

MELTING_TOKENS = 400    # of a vocabulary: the longest, whose texts are nearest to the bound
NORMALIZERS: tuple[dict[str, Any], ...] = (
    {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "a"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "bb"},
                                         {"type": "Replace", "pattern": {"String": "b"}, "content": "cd"}]})
PARTS = ("a", "b", " ", "\n", "<aaaaaaaa  b>", "\U0001d400", "\u2581", "\u00e9", "e\u0301", "A")
TEXTS = ("x" * 5000, " " * 5000, "\n" * 5000, "-" * 5000, "=" * 5000, "\U0001d400" * 2000, "e\u0301" * 2000,
         "\u1100\u1161\u11a8" * 2000, "<|im_end|>" * 500, "\u00e9\u4e2d\U0001f600\x00" * 500,
         "\x06" * 3000 + "\U000c8000" * 3000)
ADDED = {"id": 1000, "content": "<aaaaaaaa  b>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}


def marks_tokenizer() -> bytes:
    """Characters and bytes, with spaces written as marks of which eight are one token."""
    mark = "\u2581"
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", *(mark * 2 ** power for power in range(4))]
    model = models.BPE(vocab={token: at for at, token in enumerate(vocab)}, byte_fallback=True,
                       merges=[(mark * 2 ** power, mark * 2 ** power) for power in range(3)])
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", mark)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer.to_str().encode()


def variants() -> dict[str, bytes]:
    """Small byte-level tokenizers, one with each normalizer and an added token that it would change."""
    plain = orjson.loads(tiny_tokenizer().to_str())
    added = [*plain["added_tokens"], ADDED]
    changed = [{**plain, "added_tokens": added, "normalizer": normalizer} for normalizer in NORMALIZERS]
    return {"bytes": byte_bundle().tokenizer_json, "tiny": orjson.dumps(plain),
            "marks": marks_tokenizer(), **{f"normalized{at}": orjson.dumps(wire) for at, wire in enumerate(changed)}}


VARIANTS = variants()


@cache
def tokenizer_and_bound(name: str) -> tuple[PromptTokenizer, TokenBound, tuple[str, ...]]:
    """A tokenizer, its bound, and the texts of its longest tokens."""
    tokenizer = (PromptTokenizer(replace(byte_bundle(), tokenizer_json=VARIANTS[name])) if name in VARIANTS
                 else renderer_of(name).tokenizer)
    bound = token_bound(tokenizer.bundle.tokenizer_json)
    assert bound is not None
    longest = sorted(range(tokenizer.vocab_size), key=lambda token_id: len(tokenizer.token_text(token_id) or ""))
    texts = {tokenizer.decode([token_id], skip_special_tokens=False) for token_id in longest[-MELTING_TOKENS:]}
    return tokenizer, bound, tuple(sorted(texts - {""}))


@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_text_has_fewer_tokens_than_the_bound(name: str, data: st.DataObject) -> None:
    tokenizer, bound, melting = tokenizer_and_bound(name)
    part = st.sampled_from(melting) | st.sampled_from(PARTS) | st.text(max_size=8)
    runs = data.draw(st.lists(st.tuples(part, st.integers(1, 100)), max_size=4))
    text = "".join(piece * times for piece, times in runs)
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert bound.tokens_min(text) <= num_tokens
    enough = data.draw(st.integers(1, 2000))
    assert bound.tokens_min(text, enough) <= num_tokens


@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_long_runs_of_hard_characters(name: str) -> None:
    tokenizer, bound, _ = tokenizer_and_bound(name)
    for text in TEXTS:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert bound.tokens_min(text) <= num_tokens, text[:20]


@given(tokens=st.sets(st.binary(min_size=1, max_size=12), max_size=40))
def test_no_token_weighs_more_than_one(tokens: set[bytes]) -> None:
    tokens |= {bytes([byte]) for byte in range(256)}
    weights = weights_of_tokens(tokens)
    for token in tokens:
        assert weights[:, list(token)].sum(axis=1).max() <= 1 + 1e-9


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_of_one_letter_is_seen_through_by_its_beginning(name: str) -> None:
    tokenizer, bound, _ = tokenizer_and_bound(name)
    num_tokens = len(tokenizer.encode("a" * 4000, add_special_tokens=False))
    assert bound.tokens_min("a" * 4000) > 0.9 * num_tokens
    enough = CHUNK_CHARS // 16
    assert enough <= bound.tokens_min("a" * (100 * CHUNK_CHARS), enough) <= 100 * CHUNK_CHARS
