"""Public prefixes: texts that every tenant may find in the cache, whoever sent them first.

Owns: their token ids for each model, and how far a prompt agrees with one of them. Must never: let anything but the
operator's own text be public: a request is compared by token ids, after rendering.

A prompt that agrees with a public text only up to some token is public only up to there: these tokens are the text's
own beginning, and the block in which they end is salted already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat
from worker.protocol.api_error import ApiError

MODELS_REMEMBERED_MAX = 64
# Two questions with nothing in common: what both renderings begin with is the operator's text and the template's.
_QUESTIONS = ("a", "0")


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """`system` is a system prompt, `text` the beginning of a completion; one of them is None."""

    name: str
    system: str | None = None
    text: str | None = None

    def token_ids(self, renderer: PromptRenderer) -> list[int]:
        """As this model sees it; empty when its template has no place for a system prompt."""
        if self.text is not None:
            return renderer.tokenizer.encode(self.text, add_special_tokens=True)
        try:
            first, second = (renderer.chat(parse_chat(orjson.dumps({"model": "public", "messages": [
                {"role": "system", "content": self.system}, {"role": "user", "content": question}]})))
                for question in _QUESTIONS)
        except ApiError:
            return []
        return first[:common_length(first, second)]


class PublicPrefixes:
    """All of them. Remembers the ids for each tokenizer and template that it met."""

    def __init__(self, prefixes: Sequence[PublicPrefix] = ()) -> None:
        self._prefixes = tuple(prefixes)
        self._by_bundle: dict[str, list[list[int]]] = {}

    def public_length(self, renderer: PromptRenderer, prompts: Sequence[Sequence[int]]) -> int:
        """Tokens at the start of every one of these prompts that belong to a public text."""
        if not self._prefixes:
            return 0
        public = self._ids_for(renderer)
        return min((max((common_length(prompt, ids) for ids in public), default=0) for prompt in prompts), default=0)

    def _ids_for(self, renderer: PromptRenderer) -> list[list[int]]:
        known = self._by_bundle.get(renderer.bundle.digest)
        if known is None:
            known = [prefix.token_ids(renderer) for prefix in self._prefixes]
            if len(self._by_bundle) >= MODELS_REMEMBERED_MAX:
                self._by_bundle.clear()
            self._by_bundle[renderer.bundle.digest] = known
        return known


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with. Slices are compared in C, so a long match costs little."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):  # packed ids and lists are never equal as they are
            low = middle
        else:
            high = middle - 1
    return low
