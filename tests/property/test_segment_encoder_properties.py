"""Stretches remembered by their content: the ids are the whole text's, for a toy over ten thousand steps and for real
tokenizers, and the memory stays under its cap."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_piece_trie_machine import AFTER_A_SPACE, by_word
from tests.property.test_prefix_encoder_properties import NAMES, added_tokens, tokenizer_named, whole
from tests.support.hard_texts import families_of_texts
from worker.prompt.cut_rules import boundary_tokens, read_rules
from worker.prompt.prefix_encoder import PrefixEncoder
from worker.prompt.segment_encoder import SegmentEncoder
from worker.prompt.segment_memory import SegmentMemory

NUM_STEPS = 10_000
TOY = {"<s>": 900_001, "<e>": 900_002}
SCOPES = ("", "a", "b")


def toy_ids(text: str) -> array[int]:
    """by_word(), with two added tokens taken out first."""
    token_ids, start, at = array("I"), 0, 0
    while at < len(text):
        token = text[at:at + 3]
        if token in TOY:
            token_ids += by_word(text[start:at])
            token_ids.append(TOY[token])
            start = at = at + 3
        else:
            at += 1
    return token_ids + by_word(text[start:])


def toy_encoder(max_bytes: int, *, long_max_bytes: int | None = None) -> SegmentEncoder:
    def encode(texts: object) -> list[array[int]]:
        return [by_word(text) for text in texts]  # type: ignore[attr-defined]

    prefixes = None if long_max_bytes is None else PrefixEncoder(AFTER_A_SPACE, encode, long_max_bytes, 64)
    return SegmentEncoder(TOY, encode, prefixes=prefixes, max_bytes=max_bytes)


def conversation(rng: random.Random, stretches: list[str]) -> str:
    """Old stretches and new ones in any order, with boundaries between most of them."""
    parts = []
    for _ in range(rng.randrange(6)):
        if stretches and rng.random() < 0.7:
            stretch = rng.choice(stretches)
        else:
            stretch = "".join(rng.choice("ab  é<>se") for _ in range(rng.choice((0, 5, 30, 30, 1500))))
            stretches[rng.randrange(len(stretches)) if len(stretches) >= 40 else len(stretches):] = [stretch]
        parts += [stretch, rng.choice(("<s>", "<e>", "<e><s>", ""))]
    return "".join(parts)


@pytest.mark.parametrize(("max_bytes", "long_max_bytes"), [(0, None), (4_000, 2_000), (40_000, 20_000),
                                                           (2_000_000, 500_000)])
def test_ten_thousand_steps(max_bytes: int, long_max_bytes: int | None) -> None:
    rng = random.Random(max_bytes)
    encoder = toy_encoder(max_bytes, long_max_bytes=long_max_bytes)
    memory, stretches = encoder.memory, list[str]()
    for step in range(NUM_STEPS // 4):
        texts = [conversation(rng, stretches) for _ in range(rng.choice((1, 1, 2)))]
        assert encoder.encode_many(texts, rng.choice(SCOPES)) == [toy_ids(text) for text in texts]
        assert memory.num_bytes <= max_bytes
        if step % 50 == 0:
            memory.check_invariants()
    assert (memory.num_found > NUM_STEPS // 4) == (max_bytes >= 2_000_000), "with room most stretches are found"


def test_a_stretch_is_found_behind_whatever_stood_before_it() -> None:
    encoder = toy_encoder(1 << 20)
    encoder.encode_many(["<s>the same document<e>"])
    missed = encoder.memory.num_missed

    encoder.encode_many(["<s>another<e><s>the same document<e>"])

    assert encoder.memory.num_missed == missed + 1


def test_little_that_is_new_is_tokenised_at_once_and_much_is_left() -> None:
    encoder = toy_encoder(1 << 20)
    old, new = "<s>" + "a document " * 50 + "<e>", "<s>and a question<e>"
    assert encoder.encode_if_known(old, "", 100) is None
    encoder.encode_many([old])

    assert encoder.encode_if_known(old + new, "", 14) == toy_ids(old + new)
    assert encoder.encode_if_known(old + "<s>and another<e>", "", 5) is None
    assert encoder.encode_if_known(old, "another scope", 100) is None


def test_a_scope_never_sees_another() -> None:
    encoder = toy_encoder(1 << 20)
    encoder.encode_many(["<s>a secret<e>"], "one")

    assert encoder.memory.get(("one", "a secret")) is not None
    assert encoder.memory.get(("two", "a secret")) is None


def test_what_is_used_survives_what_is_not() -> None:
    memory = SegmentMemory(20_000)
    for number in range(200):
        memory.put(("", f"stretch {number}"), array("I", [number]))
        assert number == 0 or memory.get(("", "stretch 0")) == array("I", [0])
        memory.check_invariants()

    assert memory.get(("", "stretch 1")) is None
    assert memory.get(("", "stretch 199")) is not None


def test_what_is_too_large_is_not_remembered() -> None:
    memory = SegmentMemory(2_000)
    memory.put(("", "x" * 800), array("I", [1]))

    assert memory.get(("", "x" * 800)) is None
    assert memory.num_bytes == 0


@pytest.mark.parametrize("num_chars", [20, 700])
def test_the_charge_covers_what_python_allocates(num_chars: int) -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choice("abcdefg  ") for _ in range(num_chars)) for _ in range(200)]
    memory = SegmentMemory(1 << 30)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for text in texts:
        memory.put(("", text[:1] + text[1:]), by_word(text))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.5 * memory.num_bytes < held < memory.num_bytes


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_whole_texts_for_real_tokenizers(name: str) -> None:
    rules = read_rules(tokenizer_named(name).bundle.tokenizer_json)
    assert rules is not None
    boundaries = boundary_tokens(rules)
    assert boundaries, "this tokenizer may be cut at its added tokens"

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(families_of_texts(added_tokens(name)), st.integers(0, 30_000))
    def check(texts: list[str], max_bytes: int) -> None:
        encoder = SegmentEncoder(boundaries, lambda parts: [array("I", whole(name, part)) for part in parts],
                                 max_bytes=max_bytes)
        for text in [*texts, "".join(texts), *texts]:
            assert encoder.encode_many([text])[0].tolist() == whole(name, text)
            assert tokenizer_named(name).encode(text, add_special_tokens=False) == whole(name, text)
        encoder.memory.check_invariants()

    check()
