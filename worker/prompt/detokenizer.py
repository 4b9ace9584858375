"""Token ids to text as they arrive: never half a character, never any part of a stop string.

Owns one choice's output text. Must never look at finish reasons or limits: it knows text, not requests.
Without stop strings, all deltas plus finish() equal the tokenizer's decode() of all ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.prompt.stop_matcher import StopMatcher
from worker.prompt.text_decoder import text_decoder
from worker.prompt.tokenizer import PromptTokenizer

PROMPT_TAIL_TOKENS = 8
"""How many of the prompt's last ids to pass as `prompt_tail_ids`: more than any character or byte run needs."""


class TextDelta(NamedTuple):
    """New text that is safe to send. `stopped`: a stop string was found after `num_tokens_used` of the pushed ids."""

    text: str
    stopped: bool
    num_tokens_used: int


class StreamDetokenizer:
    """One choice's text stream.

    `prompt_tail_ids`: the prompt's last ids, so that a leading space of the output is kept and a character begun in
    the prompt is completed. `min_tokens`: stop strings are not looked for in the text of that many first tokens.
    `stop_string`: the one that was found.
    """

    def __init__(self, tokenizer: PromptTokenizer, *, prompt_tail_ids: Sequence[int] = (),
                 stop: tuple[str, ...] = (), skip_special_tokens: bool = True, min_tokens: int = 0) -> None:
        self._decoder = text_decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        for token_id in prompt_tail_ids:
            self._decoder.push(token_id)
        self._matcher = StopMatcher(stop) if stop else None
        self._num_exempt = min_tokens
        self._stopped = False
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next ids. Once stopped, everything further is ignored (no text, no tokens used)."""
        if self._stopped:
            return TextDelta("", True, 0)
        texts = []
        for num_used, token_id in enumerate(token_ids, start=1):
            texts.append(self._match(self._decoder.push(token_id)))
            if self._stopped:
                return TextDelta("".join(texts), True, num_used)
        return TextDelta("".join(texts), False, len(token_ids))

    def finish(self) -> str:
        """What was held back for a stop string or character that never came; "" when stopped. Call it once."""
        if self._stopped:
            return ""
        self._num_exempt = 0
        text = self._match(self._decoder.finish())
        return text if self._stopped or self._matcher is None else text + self._matcher.finish()

    def _match(self, text: str) -> str:
        if self._matcher is None:
            return text
        if self._num_exempt > 0:
            self._num_exempt -= 1
            return text
        matched = self._matcher.push(text)
        self._stopped, self.stop_string = matched.stopped, matched.stop
        return matched.text
