"""Hypothesis strategies for texts on which a tokenizer's shortcuts go wrong, and for texts that share beginnings."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

WORDS = ("the", "The", "word", "don't", "I'LL", "it's", "x", "é", "naïve", "cafe\u0301", "Å", "ﬁ", "ſ", "K", "Привет",
         "мир", "й", "и\u0306", "Ελλάδα", "שלום", "שָׁלוֹם", "مرحبا", "السَّلامُ", "今天天气", "日本語", "ガ",
         "か\u3099", "한국어", "\u1112\u1161\u11ab", "ภาษาไทย", "नमस्ते", "123", "4", "1234567", "٣٤", "½",
         "²", "v1.2", "\u212b", "\u212a", "e\u0301\u0327")
SPACES = (" ", "  ", "   ", " " * 17, "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\t", " \n ", "\u00a0", "\u3000",
          "\u2028", "\u0085", "\u200b", "\x0b")
MARKS = (",", ".", ";", ":", "!", "?", "'", "’", "\"", "-", "—", "…", "，", "。", "！", "(", ")", "{}", "//", "==",
         "<", ">", "|", "<|", "|>", "▁", "Ġ", "\u0301", "\u0338", "\u20dd", "\ufeff", "\x00")
EMOJI = ("🙂", "🌦️", "👨\u200d👩\u200d👧", "🏳️\u200d🌈", "🇩🇪", "👍🏽", "\U0001fae8", "\U0001f9ff")


def hard_texts(added_tokens: Sequence[str], max_size: int = 60) -> st.SearchStrategy[str]:
    """Texts of what tokenizers treat apart, with text of special tokens, whole and torn, in between."""
    torn = [token[:-1] for token in added_tokens if len(token) > 2] + [token[1:] for token in added_tokens]
    repeated = st.builds(lambda part, count: part * count, st.sampled_from(WORDS + SPACES + MARKS + EMOJI),
                         st.integers(2, 40))
    piece = st.one_of(
        st.sampled_from(WORDS), st.sampled_from(SPACES), st.just(" "), st.sampled_from(MARKS), st.sampled_from(EMOJI),
        st.sampled_from([*added_tokens, *torn]), repeated, st.text(max_size=4),
        st.characters(categories=("L", "M", "N", "P", "S", "Z")))
    return st.lists(piece, max_size=max_size).map("".join)


@st.composite
def families_of_texts(draw: st.DrawFn, added_tokens: Sequence[str]) -> list[str]:
    """Texts one of which begins as another does, up to any place."""
    texts = [draw(hard_texts(added_tokens))]
    for _ in range(draw(st.integers(1, 4))):
        base = draw(st.sampled_from(texts))
        at = draw(st.integers(0, len(base)))
        texts.append(base[:at] + draw(hard_texts(added_tokens, max_size=25)))
    return texts
