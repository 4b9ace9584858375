"""What one token adds to a text, read from the tokenizer's `decoder` section.

Owns the knowledge of the decoders that language models use: byte-level BPE, byte-fallback SentencePiece and
Metaspace. Must never guess: a decoder it does not know is `OTHER`, and its users fall back on decoding whole runs.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, NamedTuple

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(Enum):
    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte-fallback"
    METASPACE = "metaspace"
    OTHER = "other"


class DecoderShape(NamedTuple):
    """A decoder in normal form.

    `replacements` turn a token into text (("▁", " "),). `strip_char` is taken off the very start of a text, up to
    `num_stripped` times. `drops_first_marks`: a Metaspace decoder that removes, not replaces, them in a text's first
    token.
    """

    kind: DecoderKind
    replacements: tuple[tuple[str, str], ...] = ()
    strip_char: str = " "
    num_stripped: int = 0
    drops_first_marks: bool = False


def decoder_shape(config: dict[str, Any]) -> DecoderShape:
    """Recognise tokenizer.json's `decoder` section."""
    kind = config.get("type")
    steps = config["decoders"] if kind == "Sequence" else [config]
    if len(steps) == 1:
        if steps[0].get("type") == "ByteLevel":
            return DecoderShape(DecoderKind.BYTE_LEVEL)
        if steps[0].get("type") == "Metaspace":
            mark = steps[0].get("replacement", "▁")
            drops = steps[0].get("prepend_scheme", "always") != "never"
            return DecoderShape(DecoderKind.METASPACE, ((mark, " "),), drops_first_marks=drops)
    return _byte_fallback_shape(steps)


def byte_of(token: str) -> int | None:
    """The byte that a byte-fallback token such as "<0xE2>" stands for; None for every other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def text_of_token(token: str, shape: DecoderShape) -> str:
    """A whole token's text under a decoder that replaces marks."""
    for pattern, content in shape.replacements:
        token = token.replace(pattern, content)
    return token


def bytes_of_token(token: str, shape: DecoderShape) -> bytes:
    """The bytes that a token adds inside a text."""
    if shape.kind is DecoderKind.BYTE_LEVEL:
        try:
            return bytes([BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return token.encode()  # an added token, written as itself
    byte = byte_of(token) if shape.kind is DecoderKind.BYTE_FALLBACK else None
    return text_of_token(token, shape).encode() if byte is None else bytes([byte])


def _byte_fallback_shape(steps: list[dict[str, Any]]) -> DecoderShape:
    """Replace*, ByteFallback, Fuse and at most one Strip of the start, in this order: Llama 2, Gemma, Mistral."""
    replacements = []
    remaining = list(steps)
    while remaining and remaining[0].get("type") == "Replace" and "String" in remaining[0].get("pattern", {}):
        step = remaining.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step.get("type") for step in remaining]
    if kinds[:2] != ["ByteFallback", "Fuse"] or kinds[2:] not in ([], ["Strip"]):
        return DecoderShape(DecoderKind.OTHER)
    strip: dict[str, Any] = remaining[2] if kinds[2:] else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"]:
        return DecoderShape(DecoderKind.OTHER)
    return DecoderShape(DecoderKind.BYTE_FALLBACK, tuple(replacements), strip["content"], strip["start"])


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_level_alphabet()
