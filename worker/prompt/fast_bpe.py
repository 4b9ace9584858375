"""Byte-level BPE through tiktoken, for tokenizers whose ids it is proven to give.

Owns that proof, made once per tokenizer. tiktoken merges any two neighbours that make a token, lowest id first, and
takes a word that is a token at once; tokenizers merges listed pairs only, in the order of the list. Both give the
same when the list's order is the order of the ids and either the list holds every pair that makes a token, or every
token comes out of its own text as itself, its parts made first: two neighbours that make a token are then the pair
that the list has for it, since nothing crossed their ends before. A run over hard texts checks the reasoning.

Texts with characters on whose class the two libraries' Unicode tables might differ are not taken.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from tiktoken import Encoding
from tokenizers import Tokenizer

from worker.prompt.cut_rules import GPT2_PATTERN, HARD_TEXTS, WORD_PATTERNS, TokenizerRules, never_overlap, steps_of
from worker.prompt.token_bytes import BYTE_OF_CHAR

_IDEOGRAPHS_AND_EMOJI = ((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F),
                         (0x1F680, 0x1F6C5))
_LETTERS_IN_DISGUISE = "\u017f\u212a"    # an s and a k when case is ignored
_ASCII_END = 0x80
_NONE: frozenset[str] = frozenset()
_TEXT_CHARS_MAX = 8_192     # its expressions backtrack on a stack: a megabyte of spaces is not for them
_BYTES_OF_KNOWN = frozenset(range(0x80, 0xC0)) | frozenset(range(0xC2, 0xF1))   # those beyond ASCII


class FastBpe:
    """Ids of texts that it is sure about. Safe to use from several threads; works without the GIL."""

    def __init__(self, encoding: Encoding, *, normal_form: bool, missing: Collection[int] = ()) -> None:
        self.encoding = encoding
        missing_ascii = "".join(f"\\x{byte:02x}" for byte in missing if byte < _ASCII_END)
        self._missing = re.compile(f"[{missing_ascii}]") if missing_ascii else None
        self._normal_form = normal_form
        added = map(re.escape, sorted(encoding.special_tokens_set))
        self._added = re.compile("|".join(added)) if encoding.special_tokens_set else None
        self._known = known_characters()

    def encode(self, text: str, *, has_added: bool = True) -> array[int] | None:
        """The ids of a text with its added tokens, no special tokens around it; None when not sure.

        `has_added` False: the caller knows that none is in it.
        """
        if len(text) > _TEXT_CHARS_MAX:
            return None
        if self._missing is not None and self._missing.search(text) is not None:
            return None
        if not text.isascii():
            if self._known.fullmatch(text) is None:
                return None
            # What is in normal form already is left alone, and so is every stretch of it.
            if self._normal_form and not unicodedata.is_normalized("NFC", text):
                return None
        # Naming only those that are there: the library copies the set at every call.
        added = set(self._added.findall(text)) if has_added and self._added is not None else _NONE
        token_ids = array("I")
        token_ids.frombytes(
            self.encoding.encode_to_numpy(text, allowed_special=added, disallowed_special=()).tobytes())
        return token_ids


def fast_bpe(rules: TokenizerRules, tokenizer: Tokenizer) -> FastBpe | None:
    """tiktoken for this tokenizer; None when its ids are not proven to be the same."""
    pattern = _pattern(rules)
    if pattern is None:
        return None
    vocab = rules.model.read_vocab()
    added = {token.content: token.id for token in rules.added_tokens}
    ranks = _ranks({token: token_id for token, token_id in vocab.items() if token not in added})
    if ranks is None or not _merges_agree(rules, tokenizer, vocab, added):
        return None
    missing = {byte for byte in range(256) if bytes([byte]) not in ranks}
    if missing & _BYTES_OF_KNOWN:
        return None
    # tiktoken needs every byte; these are in no text that is taken.
    unused = max([*vocab.values(), *added.values()]) + 1
    ranks.update((bytes([byte]), unused + byte) for byte in missing)
    encoding = Encoding("headstart", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added)
    fast = FastBpe(encoding, normal_form=rules.normalizer is not None, missing=missing)
    return fast if _agrees(fast, tokenizer, tuple(added)) else None


def _merges_agree(rules: TokenizerRules, tokenizer: Tokenizer, vocab: Mapping[str, int],
                  added: Mapping[str, int]) -> bool:
    pairs = _pairs(rules.model.merges)
    if pairs is None or not _in_order_of_ids(vocab, added, pairs):
        return False
    if rules.model.ignore_merges:
        return _holds_every_pair(vocab, added, pairs)
    return _parts_come_first(vocab, pairs) and _tokens_are_themselves(tokenizer, vocab, added)


@lru_cache(1)
def known_characters() -> re.Pattern[str]:
    """Texts of characters that Unicode 3.2 knew and no version has reclassified, and of old emoji."""
    ranges = list(_IDEOGRAPHS_AND_EMOJI)
    for code in [*range(0x3400), *range(0xF900, 0x10000)]:
        char = chr(code)
        category = unicodedata.ucd_3_2_0.category(char)
        if category == "Cn" or category != unicodedata.category(char) or char in _LETTERS_IN_DISGUISE:
            continue
        if ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return re.compile("[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]*")


def _pattern(rules: TokenizerRules) -> str | None:
    """The one expression that splits words; None when there is more to this tokenizer than that."""
    model, normalizer = rules.model, rules.normalizer
    plain = (model.type == "BPE" and not model.dropout and not model.continuing_subword_prefix
             and not model.end_of_word_suffix and not model.byte_fallback)
    tokens_fit = (never_overlap([token.content for token in rules.added_tokens]) and
                  not any(token.lstrip or token.rstrip or token.single_word or token.normalized
                          for token in rules.added_tokens))
    if not plain or not tokens_fit or not (normalizer is None or normalizer.get("type") == "NFC"):
        return None
    return _pattern_of_steps(steps_of(rules.pre_tokenizer))


def _pattern_of_steps(steps: Sequence[Mapping[str, Any]]) -> str | None:
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    splits, splits_again = steps[:-1], steps[-1].get("use_regex", True)
    if not splits:
        return GPT2_PATTERN if splits_again else None
    pattern = splits[0].get("pattern", {}).get("Regex")
    isolated = splits[0].get("behavior") == "Isolated" and not splits[0].get("invert")
    return pattern if len(splits) == 1 and not splits_again and isolated and pattern in WORD_PATTERNS else None


def _ranks(vocab: Mapping[str, int]) -> dict[bytes, int] | None:
    """Ids by the bytes they stand for; None when a token is not made of bytes."""
    try:
        ranks = {bytes([BYTE_OF_CHAR[char] for char in token]): token_id for token, token_id in vocab.items()}
    except KeyError:
        return None
    return ranks if b"" not in ranks and len(ranks) == len(vocab) else None


def _pairs(merges: msgspec.Raw) -> list[tuple[str, str]] | None:
    """The merges, whichever of its two forms the file has them in."""
    listed = msgspec.json.decode(merges)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in listed]
    return [(first, second) for first, second in pairs] if all(len(pair) == 2 for pair in pairs) else None


def _in_order_of_ids(vocab: Mapping[str, int], added: Mapping[str, int], pairs: Sequence[tuple[str, str]]) -> bool:
    last = 0
    for first, second in pairs:
        token_id = vocab.get(first + second, -1)
        if token_id < last or first + second in added:
            return False
        last = token_id
    return True


def _parts_come_first(vocab: Mapping[str, int], pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether every merge stands behind those that make its parts, single bytes apart."""
    return all(len(part) == 1 or vocab[part] < vocab[first + second] for first, second in pairs
               for part in (first, second))


def _holds_every_pair(vocab: Mapping[str, int], added: Mapping[str, int], pairs: Sequence[tuple[str, str]]) -> bool:
    num_possible = sum(token[:at] in vocab and token[at:] in vocab for token in vocab if token not in added
                       for at in range(1, len(token)))
    return num_possible == len(set(pairs))


def _tokens_are_themselves(tokenizer: Tokenizer, vocab: Mapping[str, int], added: Mapping[str, int]) -> bool:
    tokens = [token for token in vocab if token not in added]
    encodings = Tokenizer(tokenizer.model).encode_batch_fast(tokens, add_special_tokens=False)
    # The words just seen are no use to anybody; the model's cache takes no more once it is full.
    tokenizer.model._clear_cache()
    return all(encoding.ids == [vocab[token]] for encoding, token in zip(encodings, tokens, strict=True))


def _agrees(fast: FastBpe, tokenizer: Tokenizer, added: Sequence[str]) -> bool:
    """Whether both give the same ids for hard texts, runs of every character of Latin-1, and added tokens in them."""
    texts = [*HARD_TEXTS, *(added[index % len(added)].join(text.split(" ")) for index, text in enumerate(HARD_TEXTS)
                            if added)]
    for code in range(256):
        texts += [chr(code) * length for length in (2, 3, 5, 17, 80)] + [f"a{chr(code)} {chr(code)}b{chr(code)}1"]
    theirs = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return all(ours is None or ours.tolist() == encoding.ids
               for ours, encoding in zip(map(fast.encode, texts), theirs, strict=True))


