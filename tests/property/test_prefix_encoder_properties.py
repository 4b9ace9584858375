"""Ids through the memory of earlier texts are the ids of the whole text, for real tokenizers and hard texts."""

from __future__ import annotations

from array import array
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.hard_texts import families_of_texts, hard_texts
from tests.support.reference_tokenizers import FAMILIES, renderer_of
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from worker.prompt.cut_rules import CutRule, cut_rule, read_rules
from worker.prompt.prefix_encoder import PrefixEncoder
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle

NAMES = ("tiny", *FAMILIES)
SMALL_PIECE_CHARS = 8
SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def tokenizer_named(name: str) -> PromptTokenizer:
    if name == "tiny":
        return PromptTokenizer(TokenizerBundle(
            tokenizer_json=tiny_tokenizer().to_str().encode(), special_tokens={},
            chat_templates={"default": CHAT_TEMPLATE}, eos_token_ids=(2,)))
    return renderer_of(name).tokenizer


@cache
def rule_of(name: str) -> CutRule:
    rules = read_rules(tokenizer_named(name).bundle.tokenizer_json)
    assert rules is not None
    rule = cut_rule(rules)
    assert rule is not None, "this tokenizer is one that can be cut"
    return rule


@cache
def added_tokens(name: str) -> list[str]:
    """A few that stand in templates, and some of every other kind."""
    rules = read_rules(tokenizer_named(name).bundle.tokenizer_json)
    assert rules is not None
    contents = [token.content for token in rules.added_tokens]
    return sorted({*contents[:8], *contents[-4:], *contents[::max(1, len(contents) // 12)]})


def whole(name: str, text: str) -> list[int]:
    """What the tokenizers library says, with nothing of ours in between."""
    token_ids: list[int] = tokenizer_named(name)._tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


def small_encoder(name: str, max_bytes: int = 1 << 20) -> PrefixEncoder:
    """Pieces so small that short texts have many, and the tokenizer's own way of encoding."""
    return PrefixEncoder(rule_of(name), lambda texts: [array("I", whole(name, text)) for text in texts], max_bytes,
                         SMALL_PIECE_CHARS)


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_leaves_the_ids_alone(name: str) -> None:
    @SETTINGS
    @given(hard_texts(added_tokens(name)))
    @example("don't,  x\n\n\ny. é, a\u0301, <|im_start|>user\n, the end")
    def check(text: str) -> None:
        cuts = sorted({rule_of(name).last(text, 0, end) for end in range(1, len(text) + 1)})
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert [token_id for part in parts for token_id in whole(name, part)] == whole(name, text)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_share_a_beginning(name: str) -> None:
    @SETTINGS
    @given(families_of_texts(added_tokens(name)), st.integers(0, 12_000))
    def check(texts: list[str], max_bytes: int) -> None:
        encoder = small_encoder(name, max_bytes)
        for text in [*texts, *texts]:
            assert encoder.encode_many([text])[0].tolist() == whole(name, text)
            encoder.trie.check_invariants()

    check()


@pytest.mark.parametrize("name", NAMES)
def test_long_prompts_as_the_worker_encodes_them(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @settings(max_examples=12, deadline=None)
    @given(families_of_texts(added_tokens(name)), st.integers(1, 6))
    def check(texts: list[str], times: int) -> None:
        prompts = ["The quick brown fox, and so on. " * 60 + text * times for text in texts]
        for prompt in prompts:
            assert tokenizer.encode(prompt, add_special_tokens=False) == whole(name, prompt)
        expected = [tokenizer._tokenizer.encode(prompt).ids for prompt in prompts]
        assert tokenizer.encode_many(prompts, add_special_tokens=True) == expected

    check()
