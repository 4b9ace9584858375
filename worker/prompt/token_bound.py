"""From below, how many tokens a text has: known from its bytes, without tokenising it.

Owns: which tokenizers have such a bound. A tokenizer that drops nothing makes at least (bytes of the text) / (bytes
of its longest token) tokens. The same holds with bytes that weigh unlike, as long as no token weighs more than 1;
token_weights.py finds such weights. Must never: guess. Where a part of the tokenizer could drop text or melt much of
it into one token, there is no bound; where it may change bytes, all bytes weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from worker.prompt.token_bytes import DecoderKind, DecoderShape, bytes_of_token
from worker.prompt.token_weights import NUM_BYTES, ByteWeights, even_weights, weights_of_tokens

# Unicode normal forms shrink a text by less than this (four bytes of a mathematical letter become one).
NORMALIZER_SLACK = 4
CHUNK_CHARS = 1 << 16
_ROUNDING = 1e-9
_ASCII_KEEPING = ("NFC", "NFD", "NFKC", "NFKD")
_NORMAL_FORMS = (*_ASCII_KEEPING, "Lowercase", "Prepend")
_BYTE_LEVEL = DecoderShape(DecoderKind.BYTE_LEVEL)
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace")
Steps = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class KnownBytes:
    """The weights that hold where the bytes that become tokens are known: those of the text after `replaced`."""

    weights: ByteWeights
    replaced: tuple[tuple[str, str], ...] = ()
    ascii_only: bool = False


@dataclass(frozen=True, slots=True)
class TokenBound:
    """At most `bytes_max` bytes of a text end up in one token. `unknown` are bytes that may vanish: not counted."""

    bytes_max: int
    unknown: bytes = b""
    known: KnownBytes | None = field(default=None, compare=False, repr=False)

    def tokens_min(self, text: str, enough: float = math.inf) -> int:
        """This text has at least so many tokens. It is read only as far as `enough` are found."""
        if not self.unknown and (least := -(-len(text) // self.bytes_max)) >= enough:
            return least
        known, least = self.known, 0
        if known is None or (known.ascii_only and not text.isascii()):
            known = KnownBytes(even_weights(self.bytes_max))
        counts = np.zeros(NUM_BYTES)
        vanishing = list(self.unknown)
        for chunk in _chunks(text, known.replaced):
            counts += np.bincount(np.frombuffer(chunk, np.uint8), minlength=NUM_BYTES)
            counts[vanishing] = 0
            least = math.ceil(float((known.weights @ counts).max()) * (1 - _ROUNDING))
            if least >= enough:
                break
        return least


def _chunks(text: str, replaced: Collection[tuple[str, str]]) -> Iterator[bytes]:
    for start in range(0, len(text), CHUNK_CHARS):
        chunk = text[start:start + CHUNK_CHARS]
        for pattern, content in replaced:
            chunk = chunk.replace(pattern, content)
        yield chunk.encode(errors="ignore")


def token_bound(tokenizer_json: bytes) -> TokenBound | None:
    """The bound of one tokenizer.json; None when none is known to hold."""
    try:
        wire = orjson.loads(tokenizer_json)
        normalizers = _steps(wire.get("normalizer"), "normalizers")
        slack = _slack(normalizers)
        added = wire.get("added_tokens") or ()
        if slack is None or any(token.get("lstrip") or token.get("rstrip") for token in added):
            return None
        pre_tokenizers = _steps(wire.get("pre_tokenizer"), "pretokenizers")
        bound = _vocabulary_bound(wire["model"], pre_tokenizers)
        if bound is None or (bound.unknown and slack > 1):
            return None
        contents = [token["content"] for token in added]
        longest = max([bound.bytes_max, *(len(content.encode()) for content in contents)])
        known = _known_bytes([*wire["model"]["vocab"]], contents, normalizers, pre_tokenizers)
        return TokenBound(slack * longest, bound.unknown, known)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None  # a shape that is not known here: whoever loads it says what is wrong with it


def _vocabulary_bound(model: dict[str, Any], pre_tokenizers: Steps) -> TokenBound | None:
    """The vocabulary's longest token in bytes, and the bytes that it has no token for."""
    vocab = model["vocab"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    for step in pre_tokenizers:
        keeps = step["type"] == "Split" and step.get("behavior") != "Removed"
        if not keeps and step["type"] not in _KEEPING_PRE_TOKENIZERS:
            return None
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        return TokenBound(max(map(len, vocab)), _unknown_bytes(vocab))
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return TokenBound(max(len(token.encode()) for token in vocab))
    return None


def _known_bytes(vocab: Sequence[str], added: Sequence[str], normalizers: Steps,
                 pre_tokenizers: Steps) -> KnownBytes | None:
    """The weights of a tokenizer whose normalizer leaves bytes alone, or exchanges single characters; else None."""
    keeps = all(step["type"] in _ASCII_KEEPING for step in normalizers)
    exchanges = all(step["type"] == "Replace" and len(step["pattern"]["String"]) == 1 for step in normalizers)
    if not (keeps or exchanges) or any(step["type"] == "Metaspace" for step in pre_tokenizers):
        return None
    replaced = () if keeps else tuple((step["pattern"]["String"], step["content"]) for step in normalizers)
    contents = [*added]     # as the text spells them, and as it does after the exchange
    for pattern, content in replaced:
        contents += [token.replace(pattern, content) for token in contents]
    is_byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    spelled = [bytes_of_token(token, _BYTE_LEVEL) if is_byte_level else token.encode() for token in vocab]
    tokens = {*spelled, *(content.encode() for content in contents), *map(bytes, zip(range(NUM_BYTES)))}
    return KnownBytes(weights_of_tokens(tokens), replaced, ascii_only=bool(normalizers) and keeps)


def _unknown_bytes(vocab: dict[str, int]) -> bytes:
    known = {bytes_of_token(token, _BYTE_LEVEL) for token in vocab if len(token) == 1}
    return bytes(byte for byte in range(256) if bytes([byte]) not in known)


def _slack(normalizers: Steps) -> int | None:
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] not in _NORMAL_FORMS:
            return None
    return NORMALIZER_SLACK if normalizers else 1


def _steps(config: dict[str, Any] | None, key: str) -> Steps:
    if config is None:
        return []
    return list(config[key]) if config["type"] == "Sequence" else [config]
