"""Chat messages to text (interface first; the body is being written)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplate:
    """One compiled Jinja template, rendered exactly as transformers renders it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.uses_tools = False

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               template_kwargs: Mapping[str, Any] | None = None) -> str:
        raise AssertionError("being written")
