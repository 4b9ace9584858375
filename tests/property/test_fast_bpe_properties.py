"""tiktoken's ids are the tokenizer's own on every text it takes, and it is refused where that is not so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer

from tests.property.test_prefix_encoder_properties import added_tokens, tokenizer_named, whole
from tests.support.hard_texts import hard_texts
from tests.support.tiny_tokenizer import tiny_tokenizer
from worker.prompt.cut_rules import read_rules
from worker.prompt.fast_bpe import FastBpe, fast_bpe, known_characters

FAST = ("tiny", "smollm2", "qwen3", "llama3_1")
BATCH = 4096


def fast_of(name: str) -> FastBpe:
    fast = tokenizer_named(name)._fast_bpe
    assert fast is not None, f"{name} is byte-level BPE"
    return fast


def edited(change: Callable[[dict[str, Any]], object]) -> FastBpe | None:
    """What is made of the tiny tokenizer after `change` to its tokenizer.json."""
    content = json.loads(tiny_tokenizer().to_str())
    change(content)
    raw = json.dumps(content).encode()
    rules = read_rules(raw)
    assert rules is not None
    return fast_bpe(rules, Tokenizer.from_buffer(raw))


@pytest.mark.parametrize("name", FAST)
def test_same_ids_on_hard_texts(name: str) -> None:
    taken = []

    @settings(max_examples=80, deadline=None)
    @given(hard_texts(added_tokens(name)))
    def check(text: str) -> None:
        token_ids = fast_of(name).encode(text)
        taken.append(token_ids is not None)
        assert token_ids is None or token_ids.tolist() == whole(name, text)

    check()
    assert sum(taken) > 8


@pytest.mark.parametrize("name", ["smollm2", pytest.param("qwen3", marks=pytest.mark.slow),
                                  pytest.param("llama3_1", marks=pytest.mark.slow)])
def test_same_ids_for_every_character(name: str) -> None:
    tokenizer = tokenizer_named(name)._tokenizer
    texts = [f"a{char}b {char}1{char}\n{char}'{char}s  {char}{char}\t"
             for char in map(chr, range(0x110000)) if known_characters().fullmatch(char)]
    assert len(texts) > 43_000
    num_taken = 0
    for start in range(0, len(texts), BATCH):
        batch = texts[start:start + BATCH]
        theirs = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, theirs, strict=True):
            token_ids = fast_of(name).encode(text)
            num_taken += token_ids is not None
            assert token_ids is None or token_ids.tolist() == encoding.ids, ascii(text)
    assert num_taken > 0.95 * len(texts)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3"])
def test_what_is_more_than_one_expression_is_left_to_its_own_library(name: str) -> None:
    assert tokenizer_named(name)._fast_bpe is None


@pytest.mark.parametrize("text", ["\U0001fae8", "\u1c89", "K\u212a", "\ud800"])
def test_characters_that_libraries_may_see_differently_are_not_taken(text: str) -> None:
    assert fast_of("tiny").encode(text) is None


def test_text_out_of_normal_form_is_not_taken() -> None:
    assert fast_of("qwen3").encode("cafe\u0301") is None
    assert fast_of("qwen3").encode("café") is not None
    assert fast_of("smollm2").encode("cafe\u0301") is not None


def test_bytes_without_a_token_are_not_taken() -> None:
    assert fast_of("smollm2").encode("a\x04b") is None
    assert fast_of("smollm2").encode("a\x05b") is not None


def swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[3], merges[40] = merges[40], merges[3]


def add_unreachable(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["zqzq"] = 500


def set_token(**flags: bool) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["added_tokens"][1].update(flags)


@pytest.mark.parametrize("change", [
    swap_merges, add_unreachable, set_token(lstrip=True), set_token(normalized=True),
    lambda content: content["model"].update(ignore_merges=True),
    lambda content: content["model"].update(dropout=0.1),
    lambda content: content["model"]["vocab"].pop("Ã"),
    lambda content: content["model"]["vocab"].update({"字": 501}),
    lambda content: content.update(normalizer={"type": "Lowercase"}),
    lambda content: content.update(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                  "use_regex": True}),
    lambda content: content.update(pre_tokenizer={"type": "Whitespace"}),
    lambda content: content["added_tokens"].append({**content["added_tokens"][1], "id": 600, "content": "end|><|"}),
])
def test_whatever_breaks_the_proof_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    assert edited(lambda content: None) is not None
    assert edited(change) is None
