"""Incremental decoding: one token id in, the text that is now certain out.

For every decoder kind, all texts pushed plus finish() equal the tokenizer's decode() of all ids together, and no
text ends inside a character. Costs per token do not grow with the length of the output. Known approximation: a
decoder of kind OTHER is decoded in windows, which is exact only where a token's text depends on few tokens before it.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from functools import partial

from worker.prompt.token_bytes import DecoderKind, byte_of, text_of_token
from worker.prompt.tokenizer import PromptTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_CONTEXT_TOKENS = 16
MAX_WINDOW_TOKENS = 64


class TextDecoder(ABC):
    """Turns ids into text. push() returns what the id made certain, finish() what was still open."""

    @abstractmethod
    def push(self, token_id: int) -> str: ...

    @abstractmethod
    def finish(self) -> str: ...


def text_decoder(tokenizer: PromptTokenizer, *, skip_special_tokens: bool) -> TextDecoder:
    """The decoder for a tokenizer, at the start of a text."""
    kind = tokenizer.decoder_shape.kind
    if kind is DecoderKind.BYTE_LEVEL:
        return _ByteLevelDecoder(tokenizer, skip_special_tokens)
    if kind is DecoderKind.BYTE_FALLBACK:
        return _ByteFallbackDecoder(tokenizer, skip_special_tokens)
    if kind is DecoderKind.METASPACE:
        return _MetaspaceDecoder(tokenizer, skip_special_tokens)
    return _WindowDecoder(tokenizer, skip_special_tokens)


class _ByteLevelDecoder(TextDecoder):
    """All tokens' bytes are one UTF-8 stream, wrong bytes becoming U+FFFD by the rule that Rust and Python share."""

    def __init__(self, tokenizer: PromptTokenizer, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallbackDecoder(TextDecoder):
    """Tokens are text, except runs of byte tokens, which become one string or, if it is no UTF-8, one U+FFFD a byte.

    A run is judged as a whole, so it stays open until another token ends it; real runs are one character or a few.
    """

    def __init__(self, tokenizer: PromptTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._shape = tokenizer.decoder_shape
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._run = bytearray()
        self._num_to_strip = self._shape.num_stripped

    def push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.token_text(token_id)
        if token is None:
            return ""
        byte = byte_of(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._strip_start(self._end_run() + text_of_token(token, self._shape))

    def finish(self) -> str:
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip_start(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(self._shape.strip_char):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


class _MetaspaceDecoder(TextDecoder):
    """Marks become spaces, but vanish in the first token of a text."""

    def __init__(self, tokenizer: PromptTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._shape = tokenizer.decoder_shape
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._at_start = self._shape.drops_first_marks

    def push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.token_text(token_id)
        if token is None:
            return ""
        if self._at_start:
            self._at_start = False
            return token.replace(self._shape.replacements[0][0], "")
        return text_of_token(token, self._shape)

    def finish(self) -> str:
        return ""


class _WindowDecoder(TextDecoder):
    """Decodes the last tokens again and again and returns what is new, keeping a few as context."""

    def __init__(self, tokenizer: PromptTokenizer, skip_special_tokens: bool) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []
        self._given = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) < MAX_WINDOW_TOKENS:
            return ""
        new = self._take_new(text)
        if len(self._window) >= MAX_WINDOW_TOKENS:
            self._window = self._window[-WINDOW_CONTEXT_TOKENS:]
            self._given = self._decode(self._window)
        return new

    def finish(self) -> str:
        return self._take_new(self._decode(self._window))

    def _take_new(self, text: str) -> str:
        new = text[len(self._given):]
        self._given = text
        return new
