"""A text too long for the context is refused before it is tokenised, so that nobody's prompt waits behind junk.

Owns the 400 for it. Must never refuse what fits: where worker/prompt/token_bound.py has no bound, tokenising shows.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker.protocol.api_error import ApiError, invalid_request
from worker.server.shell import Serving

UTF8_BYTES_MAX = 4      # of a character


def check_texts(texts: Iterable[str], serving: Serving, param: str) -> None:
    """ApiError 400 for a text that surely leaves no room for one token of an answer."""
    max_context, bound = serving.ready.max_context, serving.token_bound
    for text in texts:
        if bound is None or len(text) * UTF8_BYTES_MAX < max_context:
            continue
        if (at_least := bound.tokens_min(text, max_context)) >= max_context:
            raise too_long(f"at least {at_least}", max_context, param)


def too_long(num_tokens: str, max_context: int, param: str) -> ApiError:
    """The 400 of a prompt that does not fit."""
    return invalid_request(f"The prompt is {num_tokens} tokens long and this worker's context is {max_context} "
                           "tokens, of which at least one must be left for the answer.", param)
