"""What a single token stands for, as bytes and as text: the `token` and `bytes` of log-probabilities.

A token of a byte-level vocabulary may be a piece of a character, so its bytes are primary and its text is what they
decode to. Special tokens, which add nothing to a text, are shown by name.
"""

from __future__ import annotations

from functools import lru_cache

from worker.prompt.tokenizer import PromptTokenizer

CACHED_TOKENS_MAX = 65_536


class TokenText:
    """Bytes and text of every token id of one tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(CACHED_TOKENS_MAX)(self._bytes_of)

    def added_bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text: nothing when it is special."""
        return b"" if token_id in self._tokenizer.special_token_ids else self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        """The token's text; U+FFFD where its bytes are only part of a character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def escaped_text_of(self, token_id: int) -> str:
        r"""The token's text, or `bytes:\xe2\x82` when it is part of a character (the completions format)."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token_id: int) -> bytes:
        raw = self._tokenizer.token_bytes(token_id)
        return raw or self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
