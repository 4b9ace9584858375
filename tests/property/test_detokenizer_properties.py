"""Streaming detokenisation against the tokenizer's own decode(), and stop strings against a naive search.

Four tokenizers are made on the spot, one per decoder kind; each vocabulary holds every byte, so that any sequence of
ids, also one that is no UTF-8, is legal output of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker.prompt.detokenizer import StreamDetokenizer
from worker.prompt.stop_matcher import StopMatcher
from worker.prompt.token_bytes import DecoderKind
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle

WORDS = ["▁", "▁hello", "world", "▁wor", "ld", "é", "\N{REPLACEMENT CHARACTER}", "🙂", "a", "▁▁", "stop", "<0xZZ>"]
SPECIAL = ["<s>", "</s>", "<｜tool▁call｜>"]


def _with_added(tokenizer: Tokenizer) -> PromptTokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<note>", normalized=False), AddedToken("é è", normalized=False)])
    return PromptTokenizer(TokenizerBundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens={},
                                           chat_templates={}, eos_token_ids=()))


def _byte_level() -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġhello", "ðŁĻ", "ðŁĻĤ", "Ã©", "stop"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[],
                                     byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


def _fallback(*rest: decoders.Decoder) -> Tokenizer:
    return _sentencepiece(decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *rest]))


MAKERS = {
    "byte-level": (_byte_level, DecoderKind.BYTE_LEVEL),
    "byte-fallback": (lambda: _fallback(), DecoderKind.BYTE_FALLBACK),
    "byte-fallback, stripped": (lambda: _fallback(decoders.Strip(" ", 1, 0)), DecoderKind.BYTE_FALLBACK),
    "metaspace": (lambda: _sentencepiece(decoders.Metaspace()), DecoderKind.METASPACE),
    "metaspace, kept": (lambda: _sentencepiece(decoders.Metaspace(prepend_scheme="never")), DecoderKind.METASPACE),
}


@cache
def tokenizer_named(name: str) -> PromptTokenizer:
    make, kind = MAKERS[name]
    tokenizer = _with_added(make())
    assert tokenizer.decoder_shape.kind is kind
    return tokenizer


names = st.sampled_from(sorted(MAKERS))
# Most draws are continuation bytes, lead bytes and words, where decoders differ; some ids do not exist.
token_ids = st.lists(st.one_of(st.integers(0, 300), st.integers(128, 255), st.integers(256, 275)), max_size=30)


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [list(ids[start:end]) for start, end in pairwise(edges)]


@settings(max_examples=600, deadline=None)
@given(name=names, ids=token_ids, cuts=st.lists(st.integers(0, 40), max_size=4), skip=st.booleans())
def test_deltas_and_rest_equal_decode(name: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = tokenizer_named(name)
    stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [stream.push(chunk) for chunk in chunked(ids, cuts)]
    text = "".join(delta.text for delta in deltas) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert sum(delta.num_tokens_used for delta in deltas) == len(ids)
    assert not any(delta.stopped for delta in deltas)


@settings(max_examples=300, deadline=None)
@given(name=names, tail=token_ids, ids=token_ids)
def test_a_prompt_tail_is_context_only(name: str, tail: list[int], ids: list[int]) -> None:
    tokenizer = tokenizer_named(name)
    ahead = StreamDetokenizer(tokenizer)
    said_before = ahead.push(tail).text
    stream = StreamDetokenizer(tokenizer, prompt_tail_ids=tail)
    text = stream.push(ids).text + stream.finish()
    assert said_before + text == tokenizer.decode(tail + ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("aé🙂 \n"), max_size=12), name=st.sampled_from(["byte-level", "byte-fallback"]))
def test_valid_text_never_shows_half_a_character(text: str, name: str) -> None:
    tokenizer = tokenizer_named(name)
    if name == "byte-level":
        lookup = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
        ids = [lookup[bytes([byte])] for byte in text.encode()]
    else:
        ids = list(text.encode())
    stream = StreamDetokenizer(tokenizer)
    so_far = ""
    for token_id in ids:
        so_far += stream.push([token_id]).text
        assert text.startswith(so_far)
    assert so_far + stream.finish() == text


def naive_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first (the longer one of two), or None."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end - max(map(len, found))]
    return None


alphabet = st.text(st.sampled_from("ab🙂"), max_size=30)
stop_lists = st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=1_000, deadline=None)
@given(text=alphabet, stops=stop_lists, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_stop_matcher_equals_a_search_of_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(tuple(stops))
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    seen = given_text = ""
    for start, end in pairwise(edges):
        seen += text[start:end]
        matched = matcher.push(text[start:end])
        given_text += matched.text
        if matched.stopped:
            assert given_text == naive_stop(seen, stops)
            return
        held = seen[len(given_text):]
        assert naive_stop(seen, stops) is None
        assert seen.startswith(given_text)
        # Held back is exactly the longest end that still begins a stop string: nothing more, nothing less.
        open_ends = [size for size in range(len(seen) + 1)
                     if any(len(stop) > size and stop.startswith(seen[len(seen) - size:]) for stop in stops)]
        assert len(held) == max(open_ends, default=0)
    assert given_text + matcher.finish() == text


@settings(max_examples=400, deadline=None)
@given(name=names, ids=token_ids, stops=st.lists(st.sampled_from(["stop", " hello", "o", "é", "🙂a", "�", "llo wo"]),
                                                 min_size=1, max_size=3),
       cuts=st.lists(st.integers(0, 40), max_size=4))
def test_stop_strings_across_tokens(name: str, ids: list[int], stops: list[str], cuts: list[int]) -> None:
    """However the ids arrive, the text ends before the stop string, and the used tokens are those up to its end."""
    tokenizer = tokenizer_named(name)
    expected = naive_stop(tokenizer.decode(ids), stops)
    stream = StreamDetokenizer(tokenizer, stop=tuple(stops))
    text, num_used, stopped = "", 0, False
    for chunk in chunked(ids, cuts):
        delta = stream.push(chunk)
        text, num_used, stopped = text + delta.text, num_used + delta.num_tokens_used, delta.stopped
        if stopped:
            break
    text += stream.finish()
    assert text == (tokenizer.decode(ids) if expected is None else expected)
    if stopped:
        assert expected is not None
        assert not StreamDetokenizer(tokenizer, stop=tuple(stops)).push(ids[:num_used - 1]).stopped
        assert stream.push(ids) == ("", True, 0)


@pytest.mark.parametrize("num_tokens", [500, 1_000, 2_000])
def test_held_state_stays_small(num_tokens: int) -> None:
    """Invalid bytes without end: nothing but the last few bytes may be kept, so the cost per token is constant."""
    tokenizer = tokenizer_named("byte-level")
    bad = next(token_id for token_id in range(256) if tokenizer.token_bytes(token_id) == b"\xff")
    stream = StreamDetokenizer(tokenizer, stop=("never",))
    emitted = sum(len(stream.push([bad]).text) for _ in range(num_tokens))
    assert emitted == num_tokens
    assert stream.finish() == ""
