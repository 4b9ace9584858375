"""How many bytes of a text can end up in one token: what bounds a text's tokens from below without tokenising it.

Owns: which tokenizers have such a bound. A tokenizer that drops nothing makes at least (bytes of the text) / (bytes
of its longest token) tokens. Must never: guess. Where a part of the tokenizer could drop text or melt much of it into
one token, there is no bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from worker.prompt.token_bytes import DecoderKind, DecoderShape, bytes_of_token

# Unicode normal forms shrink a text by less than this (four bytes of a mathematical letter become one).
NORMALIZER_SLACK = 4
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend")
_BYTE_LEVEL = DecoderShape(DecoderKind.BYTE_LEVEL)
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """At most `bytes_max` bytes of a text end up in one token. `unknown` are bytes that may vanish: not counted."""

    bytes_max: int
    unknown: bytes = b""

    def tokens_min(self, text: str) -> int:
        """This text has at least so many tokens."""
        return -(-len(text.encode().translate(None, self.unknown)) // self.bytes_max)


def token_bound(tokenizer_json: bytes) -> TokenBound | None:
    """The bound of one tokenizer.json; None when none is known to hold."""
    try:
        wire = orjson.loads(tokenizer_json)
        slack = _slack(_steps(wire.get("normalizer"), "normalizers"))
        added = wire.get("added_tokens") or ()
        if slack is None or any(token.get("lstrip") or token.get("rstrip") for token in added):
            return None
        bound = _vocabulary_bound(wire["model"], _steps(wire.get("pre_tokenizer"), "pretokenizers"))
        if bound is None or (bound.unknown and slack > 1):
            return None
        longest = max([bound.bytes_max, *(len(token["content"].encode()) for token in added)])
        return TokenBound(slack * longest, bound.unknown)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None  # a shape that is not known here: whoever loads it says what is wrong with it


def _vocabulary_bound(model: dict[str, Any], pre_tokenizers: list[dict[str, Any]]) -> TokenBound | None:
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


def _unknown_bytes(vocab: dict[str, int]) -> bytes:
    known = {bytes_of_token(token, _BYTE_LEVEL) for token in vocab if len(token) == 1}
    return bytes(byte for byte in range(256) if bytes([byte]) not in known)


def _slack(normalizers: list[dict[str, Any]]) -> int | None:
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] not in _NORMAL_FORMS:
            return None
    return NORMALIZER_SLACK if normalizers else 1


def _steps(config: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if config is None:
        return []
    return list(config[key]) if config["type"] == "Sequence" else [config]
