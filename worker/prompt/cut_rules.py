"""Where a text may be cut so that the ids of both parts, one behind the other, are the ids of the whole.

Owns that judgement, made once per tokenizer from its tokenizer.json: only what is understood here is ever cut, and
a tokenizer with anything else in it is left whole. Two kinds of place are known:

Behind an added token. The tokenizer takes added tokens out of the text first and treats what lies between them one by
one. This holds where every occurrence is a match, so no two added tokens may overlap, and none may look at its
neighbours.

Between a letter and a space or punctuation mark. In the pre-tokenizers listed here no alternative goes from a letter
to such a character, looks back, or looks ahead from a letter, so there is a boundary and neither side sees the other.
Without a pre-tokenizer the same is read from the vocabulary: no token has a letter before the character that stands
for a space, so no merge crosses. Normal forms never compose across a space or these marks. An added token that has
such a pair inside forbids these places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

# Letters since long before the oldest Unicode tables in use, none of them combining.
LETTERS = "A-Za-zÀ-ÖØ-öø-ňŊ-žΑ-ΡΣ-ώА-яЁёא-תء-غف-ي一-龥ぁ-ゔァ-ヺ가-힣"
MARKS = " \n,.;:!?，。、；：！？"
_LETTER_THEN_MARK = f"[{LETTERS}](?=[{MARKS}])"
_LETTER_THEN_SPACE = f"[{LETTERS}](?= )"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_PATTERN = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^NEWLINE\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[NEWLINE]*|\s*[NEWLINE]+|\s+(?!\S)|\s+").replace("NEWLINE", "\r\n")
# Split patterns that always have a boundary between a letter and a mark.
WORD_PATTERNS = frozenset({
    GPT2_PATTERN,
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}",
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",
    _DEEPSEEK_PATTERN,
})
# Split patterns that need not have one, and whose matches contain no mark and look at nothing else.
_LOCAL_PATTERNS = frozenset({r"\p{N}{1,3}", r"\p{N}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})
# Texts in which a wrong idea of a pre-tokenizer shows.
HARD_TEXTS = (
    "It's what they'LL say: don't, I'd've, we're 's 't A'B a 'S. \t x  y   z\n\n\nNext\r\n\r\n  line \n \n end  ",
    "a1b22c333d4444 5 66 777,8888. 9;10:11! 12? x²y ½ 3٣४ v1.2.3-rc4+build_5 0x1F 1e-9 $5.00 100% #1 @a",
    "def f(x):\n\treturn {'a': [1, 2, 3]}  # ok?\n\n\n    if x != y and not z:\n      print(\"a b\", x, end='')\r\n",
    "Café, naïve; cafe\u0301, e\u0301! \u00e9 , o\u0302\u0323 x\u0301\u0327. \u1100\u1161\u11a8 각, 한국어. ﬁ ﬂ Å Å",
    "今天天气很好，我们去公园吧。他说：“好的！”、对；真的？日本語のテキスト、カタカナ。",
    "ﾊﾝｶｸ１２３ 中文English混合 text中文,x ・ー。ヽ、々",
    "Привет, мир! Ёлка; й и\u0306. Γειά σου, Κόσμε. שלום, עולם! שָׁלוֹם. مرحبا، بالعالم. السَّلامُ 12٣",
    "🌦️ a🙂, 👨‍👩‍👧‍👦. x🏳️‍🌈! e\u200db \u200b \ufeff a\u00a0b \u2028c\u2029 d\u3000e \u0085f \x00 \x7f …—'’‘“” a’s",
    "word" * 40 + " " + "ab, " * 30 + "x " * 30 + " " * 40 + "y" + "\n" * 20 + "z. " + "\t" * 9 + "!" * 9 + "? a",
)
_BOUNDARY_TOKENS_MAX = 2048     # one regular expression holds them all


class AddedTokenEntry(msgspec.Struct):
    """An entry of tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class ModelRules(msgspec.Struct):
    """The part behind the pre-tokenizer. `vocab` and `merges` are megabytes and left undecoded until asked for."""

    type: str = ""
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool | None = None
    byte_fallback: bool | None = None
    ignore_merges: bool | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"[]")

    def read_vocab(self) -> dict[str, int]:
        """Token to id."""
        return msgspec.json.decode(self.vocab, type=dict[str, int])


class TokenizerRules(msgspec.Struct):
    """What of a tokenizer.json decides where it can be cut."""

    model: ModelRules
    added_tokens: list[AddedTokenEntry] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(TokenizerRules)


def read_rules(tokenizer_json: bytes) -> TokenizerRules | None:
    """The rules of a tokenizer.json; None when it is of a form that is not known here."""
    try:
        return _decoder.decode(tokenizer_json)
    except msgspec.MsgspecError:
        return None


class CutRule:
    """The last place in a stretch of text at which it may be cut."""

    __slots__ = ("_patterns",)

    def __init__(self, places: Sequence[str]) -> None:
        # Greedy, so the first match found is the last in the text. The rarer places are tried when there is no other.
        self._patterns = [re.compile(f"(?s:.*)(?:{place})") for place in places]

    def last(self, text: str, start: int, end: int) -> int:
        """A cut in (start, end], judged by text[start:end] alone; `start` when there is none."""
        for pattern in self._patterns:
            match = pattern.match(text, start, end)
            if match is not None:
                return match.end()
        return start


def cut_rule(rules: TokenizerRules) -> CutRule | None:
    """The places where texts of this tokenizer may be cut; None when it has to see every text whole."""
    if not _sees_only_itself(rules):
        return None
    contents = [token.content for token in rules.added_tokens]
    places = []
    inside = _inside_place(rules)
    if inside is not None and not any(re.search(inside, content) for content in contents):
        places.append(inside)
    boundaries = boundary_tokens(rules)
    if 0 < len(boundaries) == len(set(contents)) <= _BOUNDARY_TOKENS_MAX:
        places.append("|".join(map(re.escape, sorted(boundaries))))
    return CutRule(places) if places else None


def boundary_tokens(rules: TokenizerRules) -> dict[str, int]:
    """The added tokens, with their ids, at any or all of whose occurrences a text may be cut: those that can share a
    character with no other, so that every occurrence is a match."""
    if not (_sees_only_itself(rules) and _treats_parts_alike(rules)):
        return {}
    unsafe = overlapping({token.content for token in rules.added_tokens})
    return {token.content: token.id for token in rules.added_tokens if token.content not in unsafe}


def cuts_hold(rule: CutRule, encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]) -> bool:
    """Whether the rule's cuts change nothing in texts made to break them: a check on the reasoning above."""
    for text in HARD_TEXTS:
        cuts = sorted({rule.last(text, 0, end) for end in range(1, len(text) + 1)})
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole, *encoded = encode([text, *parts])
        if list(whole) != [token_id for part in encoded for token_id in part]:
            return False
    return True


def never_overlap(contents: Sequence[str]) -> bool:
    """Whether no occurrence of one of these strings can share a character with another occurrence of any."""
    return not overlapping(set(contents))


def overlapping(contents: Collection[str]) -> set[str]:
    """Those of which an occurrence can share a character with another occurrence, of itself or of another."""
    unsafe: set[str] = {content for content in contents if not content}
    beginning_with: dict[str, list[str]] = {}
    for content in contents:
        for length in range(1, len(content)):
            beginning_with.setdefault(content[:length], []).append(content)
    for content in contents:
        length = len(content)
        met = [other for at in range(1, length) for other in beginning_with.get(content[at:], ())]
        met += [content[start:end] for start in range(length) for end in range(start + 1, length + 1)
                if end - start < length and content[start:end] in contents]
        if met:
            unsafe.update(met, [content])
    return unsafe


def is_identity(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer leaves every text as it is."""
    return normalizer is None or (normalizer.get("type") == "Sequence" and
                                  all(map(is_identity, normalizer.get("normalizers", ()))))


def _sees_only_itself(rules: TokenizerRules) -> bool:
    return not rules.model.dropout and all(map(_sees_no_neighbours, rules.added_tokens))


def _sees_no_neighbours(token: AddedTokenEntry) -> bool:
    return bool(token.content) and not (token.lstrip or token.rstrip or token.single_word)


def _treats_parts_alike(rules: TokenizerRules) -> bool:
    """Whether a stretch between added tokens has the same ids at the start of a text and further on."""
    if any(token.normalized for token in rules.added_tokens) and not is_identity(rules.normalizer):
        return False    # such a token is looked for in the normalised text
    return all(step.get("type") != "Metaspace" or step.get("prepend_scheme") in ("always", "never")
               for step in steps_of(rules.pre_tokenizer))


def steps_of(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The pre-tokenizers that are applied one after the other, nested sequences flattened."""
    if pre_tokenizer is None:
        return []
    if pre_tokenizer.get("type") != "Sequence":
        return [pre_tokenizer]
    return [step for inner in pre_tokenizer.get("pretokenizers", ()) for step in steps_of(inner)]


def _inside_place(rules: TokenizerRules) -> str | None:
    """The expression for cuts within plain text; None when nothing is known of this tokenizer."""
    if any(token.normalized for token in rules.added_tokens) and not is_identity(rules.normalizer):
        return None
    steps = steps_of(rules.pre_tokenizer)
    if _keeps_marks(rules.normalizer):
        if any(step.get("type") == "ByteLevel" for step in steps[:-1]):
            return None     # what follows it sees bytes written as letters
        return _LETTER_THEN_MARK if all(map(_is_local, steps)) and any(map(_parts_words, steps)) else None
    return _LETTER_THEN_SPACE if _merges_stop_at_spaces(rules, steps) else None


def _keeps_marks(normalizer: Mapping[str, Any] | None) -> bool:
    if is_identity(normalizer):
        return True
    assert normalizer is not None
    if normalizer.get("type") == "Sequence":
        return all(map(_keeps_marks, normalizer.get("normalizers", ())))
    return normalizer.get("type") == "NFC"      # the others take letters apart, or turn them into something else


def _is_local(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer does the same to both sides of a letter and a mark, apart or together."""
    if step.get("type") == "ByteLevel":
        return not step.get("add_prefix_space", True)
    if step.get("type") == "Split":
        pattern = step.get("pattern", {}).get("Regex")
        return (step.get("behavior") == "Isolated" and not step.get("invert")
                and (pattern in WORD_PATTERNS or pattern in _LOCAL_PATTERNS))
    return step.get("type") == "Digits"


def _parts_words(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step.get("type") == "Split" and step.get("pattern", {}).get("Regex") in WORD_PATTERNS


def _merges_stop_at_spaces(rules: TokenizerRules, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a space becomes a character that no token has behind a letter, with nothing else done to the text."""
    normalizer, model = rules.normalizer or {}, rules.model
    space = normalizer.get("content", "")
    replaces = normalizer.get("type") == "Replace" and normalizer.get("pattern") == {"String": " "}
    # After the replacement there are no spaces, so splitting at them does nothing.
    splits_nothing = all(step.get("type") == "Split" and step.get("pattern") == {"String": " "} for step in steps)
    if not (replaces and splits_nothing and len(space) == 1 and not space.isalpha() and model.type == "BPE"):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    vocab = model.read_vocab()
    if model.fuse_unk and space not in vocab:
        return False    # an unknown space would be fused with an unknown letter before it
    return re.search(f"[{LETTERS}]{re.escape(space)}", "\n".join(vocab)) is None
