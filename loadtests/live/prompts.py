"""What a trace's request asks a live server: a route and a body, the same for the same seed.

Owns the step from block ids to tokens or words, and from a conversation's text to messages. Equal block ids become
equal tokens, so what the trace shares, the prompts share; a prompt has the length that the trace says. It must never
know a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from xxhash import xxh3_64_intdigest

from loadtests.streaming_client import CHAT_PATH, COMPLETIONS_PATH
from loadtests.traces import ASSISTANT, TraceRequest

Kind = Literal["ids", "words"]
# Ids that any vocabulary of a real model has, above the special tokens that usually come first.
TOKENS_FROM, TOKENS_TO = 300, 1000
BLOCKS_KEPT = 8192
# Each one token, with the space before it, in the usual vocabularies of English.
_COMMON = ("the of and to in is it for on was with as by at from that this are be have not but they which you all "
           "we can her has there been if more when will would who so no out up into do any your what some them could "
           "time other about then its only over such new these may first two made after")
WORDS = tuple(_COMMON.split())
# In place of a message without text, such as a tool's empty result: some servers refuse those.
NOTHING = "(nothing)"
# Roles of a trace that a chat template may not know.
_ROLES = {"system": "system", "user": "user", ASSISTANT: ASSISTANT}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it is sent."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are made. `kind` is for traces without text: token ids to /v1/completions, or common words to
    /v1/chat/completions. `tokens_from` and `tokens_to` bound the ids. `is_plain`: OpenAI's own fields only, so that
    an answer may end before the length that the trace says."""

    model: str
    seed: int = 0
    kind: Kind = "ids"
    tokens_from: int = TOKENS_FROM
    tokens_to: int = TOKENS_TO
    output_max: int | None = None
    is_plain: bool = False


class PromptMaker:
    """Bodies for the requests of one trace."""

    def __init__(self, style: PromptStyle, block_size: int) -> None:
        self._style = style
        self._block_size = block_size
        self._block = lru_cache(BLOCKS_KEPT)(self._draw_block)

    def asked(self, request: TraceRequest, index: int, answers: Mapping[int, str]) -> Asked:
        """What to send for the request number `index`. `answers` stand in for what the trace's assistant said in
        the messages at these places."""
        if request.messages:
            messages = [{"role": _ROLES.get(message.role, "user"),
                         "content": answers.get(at, message.text) or NOTHING}
                        for at, message in enumerate(request.messages)]
            return Asked(CHAT_PATH, {**self._common(request), "messages": messages})
        numbers = self._numbers(request, index)
        if self._style.kind == "words":
            text = " ".join([WORDS[number % len(WORDS)] for number in numbers])
            return Asked(CHAT_PATH, {**self._common(request), "messages": [{"role": "user", "content": text}]})
        return Asked(COMPLETIONS_PATH, {**self._common(request), "prompt": numbers})

    def _common(self, request: TraceRequest) -> dict[str, Any]:
        style = self._style
        most = request.output_tokens if style.output_max is None else min(request.output_tokens, style.output_max)
        fields: dict[str, Any] = {"model": style.model, "temperature": 0, "max_tokens": most}
        return fields if style.is_plain else {**fields, "ignore_eos": True}

    def _numbers(self, request: TraceRequest, index: int) -> list[int]:
        numbers: list[int] = []
        for block_id in request.block_ids:
            numbers += self._block(block_id)
        num_own = request.prompt_tokens - len(numbers)   # behind the last full block: this request's own
        return numbers + (self._draw(f"own {index}", num_own) if num_own > 0 else [])

    def _draw_block(self, block_id: int) -> list[int]:
        return self._draw(f"block {block_id}", self._block_size)

    def _draw(self, name: str, count: int) -> list[int]:
        rng = np.random.default_rng(xxh3_64_intdigest(f"{self._style.seed} {name}".encode()))
        drawn: list[int] = rng.integers(self._style.tokens_from, self._style.tokens_to, count).tolist()
        return drawn
