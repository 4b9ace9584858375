"""Which tokenizers may be cut where, and that those which may not are left whole."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.support.hard_texts import families_of_texts
from tests.support.tiny_tokenizer import tiny_tokenizer
from worker.prompt.cut_rules import CutRule, cut_rule, never_overlap, read_rules
from worker.prompt.prefix_encoder import PrefixEncoder
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle

TOKENS = ["<s>", "</s>", "[INST]", "[/INST]"]
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TEXT = "one two [INST] three, four</s>five\n"


def made(pre: pre_tokenizers.PreTokenizer | None, *, normalizer: normalizers.Normalizer | None = None,
         added: list[AddedToken] | None = None) -> Tokenizer:
    """A small BPE tokenizer with these steps; unknown characters become <unk>, fused."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["one two three, four five six seven don't", "hello world 12 345"] * 3, trainer)
    tokenizer.add_special_tokens(added if added is not None else TOKENS)
    return tokenizer


def rule_of(tokenizer: Tokenizer) -> CutRule | None:
    rules = read_rules(tokenizer.to_str().encode())
    assert rules is not None
    return cut_rule(rules)


def cuts(rule: CutRule | None, text: str) -> list[int]:
    assert rule is not None
    return sorted({rule.last(text, 0, end) for end in range(1, len(text) + 1)} - {0})


BEHIND_TOKENS = [TEXT.index("[INST]") + 6, TEXT.index("</s>") + 4]


@pytest.mark.parametrize(("tokenizer", "expected"), [
    (made(pre_tokenizers.Metaspace(prepend_scheme="always")), BEHIND_TOKENS),
    (made(pre_tokenizers.Metaspace(prepend_scheme="never")), BEHIND_TOKENS),
    (made(pre_tokenizers.Metaspace(prepend_scheme="first")), None),
    (made(None, normalizer=LLAMA_2), BEHIND_TOKENS),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=True)), BEHIND_TOKENS),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.Lowercase()), BEHIND_TOKENS),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFKD()), BEHIND_TOKENS),
    (made(pre_tokenizers.Split(Regex(r"\w+\s"), "isolated")), BEHIND_TOKENS),
    (made(pre_tokenizers.Whitespace(), added=[]), []),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=False), added=[AddedToken("<s>", lstrip=True)]), None),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=False), added=[AddedToken("<s>", rstrip=True)]), None),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=False), added=[AddedToken("a", single_word=True)]), None),
    (made(pre_tokenizers.ByteLevel(add_prefix_space=False), added=["e t", "e two"]), None),
    (made(pre_tokenizers.Metaspace(prepend_scheme="always"), added=["[INST]", "INST"]), None),
])
def test_where_a_tokenizer_may_be_cut(tokenizer: Tokenizer, expected: list[int] | None) -> None:
    rule = rule_of(tokenizer)
    assert (rule is None) == (expected is None)
    if expected is not None:
        assert cuts(rule, TEXT) == expected


def test_between_a_letter_and_a_mark_first() -> None:
    rule = rule_of(made(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    assert cuts(rule, TEXT)[:3] == [3, 7, 20]
    assert cuts(rule, "x' 1 2, 3") == []
    assert cuts(rule, "a\u0301 b") == []


@pytest.mark.parametrize("name", ["always", "never", "prepend"])
def test_pieces_behind_tokens_alone_give_the_same_ids(name: str) -> None:
    tokenizer = (made(None, normalizer=LLAMA_2) if name == "prepend"
                 else made(pre_tokenizers.Metaspace(prepend_scheme=name)))
    rule = rule_of(tokenizer)
    assert rule is not None

    def ids(text: str) -> array[int]:
        return array("I", tokenizer.encode(text, add_special_tokens=False).ids)

    @settings(max_examples=40, deadline=None)
    @given(families_of_texts(TOKENS))
    def check(texts: list[str]) -> None:
        encoder = PrefixEncoder(rule, lambda parts: [ids(part) for part in parts], 1 << 20, 8)
        for text in [*texts, *texts]:
            assert encoder.encode_many([text]) == [ids(text)]

    check()


@given(st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4, unique=True))
def test_never_overlap_equals_trying_every_shared_character(contents: list[str]) -> None:
    def shares(first: str, second: str, shift: int) -> bool:
        span = range(max(0, shift), min(len(first), shift + len(second)))
        return bool(span) and all(first[at] == second[at - shift] for at in span)

    overlaps = any(shares(first, second, shift) for first in contents for second in contents
                   for shift in range(-len(second) + 1, len(first)) if (first, shift) != (second, 0))
    assert never_overlap(contents) == (not overlaps)


def changed(change: Callable[[dict[str, Any]], None]) -> PromptTokenizer:
    content = json.loads(tiny_tokenizer().to_str())
    change(content)
    return PromptTokenizer(TokenizerBundle(tokenizer_json=json.dumps(content).encode(), special_tokens={},
                                           chat_templates={}, eos_token_ids=()))


def test_a_tokenizer_left_whole_still_encodes() -> None:
    tokenizer = changed(lambda content: content["added_tokens"][1].update(lstrip=True))
    text = "the cat sat on the mat   <|im_start|> and the dog, " * 60
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer._tokenizer.encode(text).ids


def test_a_vocabulary_that_cannot_take_every_text_still_loads() -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1}, unk_token="<none>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PromptTokenizer(TokenizerBundle(tokenizer_json=words.to_str().encode(), special_tokens={},
                                                chat_templates={}, eos_token_ids=()))
    assert tokenizer.encode("the cat " * 300, add_special_tokens=False) == [0, 1] * 300


@pytest.mark.parametrize("text", [" " * 100_000, "a" * 20_000, " \n" * 10_000, "1" * 20_000, "🙂" * 9_000])
def test_a_long_text_without_any_place_to_cut(text: str) -> None:
    tokenizer = changed(lambda content: None)
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer._tokenizer.encode(text).ids


def test_special_tokens_around_a_long_text() -> None:
    def wrap(content: dict[str, Any]) -> None:
        content["post_processor"] = {
            "type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "e", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}
                               for name, number in (("b", 1), ("e", 2))}}
        content["post_processor"]["pair"] = [{"Sequence": {"id": "A", "type_id": 0}},
                                             {"Sequence": {"id": "B", "type_id": 0}}]

    tokenizer = changed(wrap)
    text = "the cat sat on the mat, " * 100
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *plain, 2] == tokenizer._tokenizer.encode(text).ids
