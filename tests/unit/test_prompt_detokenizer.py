"""Stories of one streamed answer; tests/property/test_detokenizer_properties.py compares with whole decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from worker.prompt.detokenizer import StreamDetokenizer, TextDelta
from worker.prompt.token_bytes import DecoderKind, decoder_shape
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle

TOKENS = ["▁Hello", "▁world", "ST", "OP", "!", "▁ST", "<0xE2>", "<0x82>", "<0xAC>", "</s>"]
HELLO, WORLD, ST, OP, BANG, SPACE_ST, E2, X82, XAC, EOS = range(len(TOKENS))


def tokenizer(decoder: decoders.Decoder | None, tokens: list[str] = TOKENS) -> PromptTokenizer:
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    if decoder is not None:
        made.decoder = decoder
    if "</s>" in tokens:
        made.add_special_tokens(["</s>"])
    return PromptTokenizer(TokenizerBundle(tokenizer_json=made.to_str().encode(), special_tokens={},
                                           chat_templates={}, eos_token_ids=(EOS,)))


@pytest.fixture(scope="module")
def llama() -> PromptTokenizer:
    """Llama 2's decoder: marks, byte fallback, one leading space stripped."""
    return tokenizer(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                        decoders.Strip(" ", 1, 0)]))


def test_the_leading_space_of_an_answer_depends_on_the_prompt(llama: PromptTokenizer) -> None:
    assert StreamDetokenizer(llama).push([HELLO, WORLD]).text == "Hello world"
    assert StreamDetokenizer(llama, prompt_tail_ids=[HELLO]).push([WORLD]).text == " world"
    assert StreamDetokenizer(llama, prompt_tail_ids=[EOS]).push([WORLD]).text == "world"


def test_a_character_comes_whole(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama)
    assert [stream.push([token_id]).text for token_id in (E2, X82, XAC, BANG)] == ["", "", "", "€!"]


def test_a_character_begun_in_the_prompt_is_completed(llama: PromptTokenizer) -> None:
    assert StreamDetokenizer(llama, prompt_tail_ids=[BANG, E2]).push([X82, XAC, BANG]).text == "€!"


def test_an_unfinished_character_at_the_end(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama)
    assert stream.push([HELLO, E2, X82]).text == "Hello"
    assert stream.finish() == "��"


def test_special_tokens_are_silent_unless_asked_for(llama: PromptTokenizer) -> None:
    assert StreamDetokenizer(llama).push([HELLO, EOS]).text == "Hello"
    assert StreamDetokenizer(llama, skip_special_tokens=False).push([HELLO, EOS]).text == "Hello</s>"


def test_a_stop_string_over_two_tokens(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama, stop=("STOP",))
    assert stream.push([HELLO, SPACE_ST]) == TextDelta("Hello ", False, 2)
    assert stream.push([OP, BANG]) == TextDelta("", True, 1)
    assert stream.push([WORLD]) == TextDelta("", True, 0)
    assert stream.finish() == ""


def test_held_text_is_given_when_it_was_no_stop(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama, stop=("STOP",))
    assert stream.push([SPACE_ST]).text == ""
    assert stream.push([BANG]).text == "ST!"
    assert stream.push([ST]).text == ""
    assert stream.finish() == "ST"


def test_text_before_and_after_a_stop_in_one_token_batch(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama, stop=("o w", "STOP"))
    assert stream.push([HELLO, WORLD, BANG]) == TextDelta("Hell", True, 2)


@pytest.mark.parametrize(("min_tokens", "num_used"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_no_stop_within_the_minimum(llama: PromptTokenizer, min_tokens: int, num_used: int) -> None:
    stream = StreamDetokenizer(llama, stop=("OP",), min_tokens=min_tokens)
    assert stream.push([ST, OP, OP, OP, BANG]) == TextDelta("ST" + "OP" * (num_used - 2), True, num_used)


def test_a_stop_that_began_within_the_minimum_does_not_count(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama, stop=("STOP",), min_tokens=1)
    assert stream.push([ST, OP, BANG]) == TextDelta("STOP!", False, 3)


def test_a_stop_completed_by_what_was_unfinished(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama, stop=("o�",))
    assert stream.push([HELLO, E2]).text == "Hell"
    assert stream.finish() == ""


def test_nothing_pushed(llama: PromptTokenizer) -> None:
    stream = StreamDetokenizer(llama, stop=("x",))
    assert stream.push([]) == TextDelta("", False, 0)
    assert stream.finish() == ""


def test_ids_without_a_token_are_silent(llama: PromptTokenizer) -> None:
    assert StreamDetokenizer(llama).push([HELLO, 10_000, WORLD]).text == "Hello world"


@pytest.mark.parametrize("decoder", [
    None, decoders.WordPiece(prefix="##", cleanup=False), decoders.BPEDecoder("</w>"),
])
def test_other_decoders_go_by_windows(decoder: decoders.Decoder | None) -> None:
    other = tokenizer(decoder, ["un", "##able", "to", "ld</w>", "wor", "x"])
    assert other.decoder_shape.kind is DecoderKind.OTHER
    ids = [0, 1, 2, 4, 3, 5] * 40
    stream = StreamDetokenizer(other)
    assert "".join(stream.push([token_id]).text for token_id in ids) + stream.finish() == other.decode(ids)


@pytest.mark.parametrize(("config", "kind"), [
    ({}, DecoderKind.OTHER), ({"type": "ByteLevel"}, DecoderKind.BYTE_LEVEL),
    ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, DecoderKind.BYTE_LEVEL),
    ({"type": "Sequence", "decoders": []}, DecoderKind.OTHER),
    ({"type": "Sequence", "decoders": [{"type": "Metaspace", "replacement": "▁"}]}, DecoderKind.METASPACE),
    ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, DecoderKind.BYTE_FALLBACK),
    ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}, DecoderKind.OTHER),
    ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, DecoderKind.OTHER),
    ({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "x"}, "content": ""},
                                       {"type": "ByteFallback"}, {"type": "Fuse"}]}, DecoderKind.OTHER),
    ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"},
                                       {"type": "Strip", "content": " ", "start": 0, "stop": 1}]}, DecoderKind.OTHER),
])
def test_only_what_is_known_for_certain_is_recognised(config: dict[str, Any], kind: DecoderKind) -> None:
    assert decoder_shape(json.loads(json.dumps(config))).kind is kind
