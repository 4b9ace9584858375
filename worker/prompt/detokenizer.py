"""Token ids to text, as they arrive (interface first; the body is being written)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.prompt.tokenizer import PromptTokenizer

PROMPT_TAIL_TOKENS = 8
"""How many of the prompt's last ids to pass as `prompt_tail_ids`."""


class TextDelta(NamedTuple):
    """New text that is safe to send. `stopped`: a stop string was found after `num_tokens_used` of the pushed ids."""

    text: str
    stopped: bool
    num_tokens_used: int


class StreamDetokenizer:
    """One choice's text stream: never half a character, never any part of a stop string."""

    def __init__(self, tokenizer: PromptTokenizer, *, prompt_tail_ids: Sequence[int] = (),
                 stop: tuple[str, ...] = (), skip_special_tokens: bool = True, min_tokens: int = 0) -> None:
        raise AssertionError("being written")

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        raise AssertionError("being written")

    def finish(self) -> str:
        """The rest: text that was held back for a stop string that never came. Call once, when not stopped."""
        raise AssertionError("being written")
