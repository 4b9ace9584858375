"""Text to token ids and back (interface first; the body is being written)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a gateway needs to render and tokenise for a model, with no hub and no files.

    `chat_templates` maps "default" and other names ("tool_use") to Jinja source; empty when the model has none.
    `special_tokens` holds the named tokens only ("bos_token": "<s>"), as templates read them.
    """

    tokenizer_json: bytes
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    eos_token_ids: tuple[int, ...]
    model_vocab_size: int | None = None

    @classmethod
    def from_directory(cls, path: Path, chat_template: Path | None = None) -> TokenizerBundle:
        """Read a Hugging Face model folder; `chat_template` (a Jinja file) replaces the folder's own templates."""
        raise AssertionError("being written")

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def tokenizer_digest(self) -> str:
        """Hex SHA-256 of what decides token ids."""
        raise AssertionError("being written")

    @property
    def template_digest(self) -> str:
        """Hex SHA-256 of what decides rendered text."""
        raise AssertionError("being written")

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the whole bundle: the ETag of GET /tokenizer."""
        raise AssertionError("being written")

    def to_wire(self) -> bytes:
        """The body of GET /tokenizer (JSON)."""
        raise AssertionError("being written")

    @classmethod
    def from_wire(cls, body: bytes) -> TokenizerBundle:
        """The inverse of to_wire(); ValueError on anything else."""
        raise AssertionError("being written")


class PromptTokenizer:
    """A loaded tokenizer. encode() releases the GIL: call it from a thread for long prompts."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self.vocab_size = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError("being written")

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        raise AssertionError("being written")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise AssertionError("being written")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text (the `bytes` of OpenAI's logprobs); b"" when it adds none."""
        raise AssertionError("being written")
