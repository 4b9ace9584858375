"""Is a prompt too long for every worker of its model? Known without tokenising for a text that is far too long.

Owns: the 400 for it, at the gateway, before any worker hears of it; and what a worker will say of an answer that may
get too long, for POST /admin/explain. Must never: refuse what fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.prompt.token_bound import TokenBound
from worker.protocol.api_error import ApiError, invalid_request


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The longest context that a worker of the model serves."""

    max_context: int
    bound: TokenBound | None
    param: str

    def is_suspect(self, num_body_bytes: int) -> bool:
        """Whether a body of this size is worth a look at its text before tokenising."""
        return self.bound is not None and num_body_bytes >= self.max_context

    def check_texts(self, texts: Iterable[str]) -> None:
        """ApiError 400 for a text that cannot have few enough tokens."""
        if self.bound is None:
            return
        for text in texts:
            if (at_least := self.bound.tokens_min(text, self.max_context)) >= self.max_context:
                self._refuse(f"at least {at_least}")

    def check_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        """ApiError 400 for a prompt that leaves no room for one token of an answer."""
        for prompt in prompts:
            if len(prompt) >= self.max_context:
                self._refuse(str(len(prompt)))

    def _refuse(self, num_tokens: str) -> None:
        raise invalid_request(f"The prompt is {num_tokens} tokens long and the longest context that a worker of this "
                              f"model serves is {self.max_context} tokens, of which at least one must be left for "
                              "the answer.", self.param)


def refusal_of_answer(max_tokens: int, num_prompt_tokens: int, max_context: int) -> ApiError | None:
    """The 400 of a worker with this context for a `max_tokens` that is more than the prompt leaves; None: it fits."""
    rest = max_context - num_prompt_tokens
    if max_tokens <= rest:
        return None
    return invalid_request(f"max_tokens is {max_tokens}, but the prompt takes {num_prompt_tokens} of the worker's "
                           f"context of {max_context} tokens and leaves {rest}.", "max_tokens")
