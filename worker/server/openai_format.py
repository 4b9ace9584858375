"""OpenAI's objects for chat and plain completions: full responses, stream chunks, usage, log-probabilities.

Pure: values in, JSON-ready dicts out. Owns the shapes; never touches a socket or the engine. A format object belongs
to one request and remembers what the next chunk depends on (text offsets, which choices have had their role chunk).
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.core.batch import TokenLogprobs
from worker.server.generation import Account, ChoiceDelta
from worker.server.token_text import TokenText

Json = dict[str, Any]
LOGPROB_MIN = -9999.0    # what OpenAI sends for an impossible token; JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every object of one response carries."""

    request_id: str
    created: int
    model: str
    system_fingerprint: str
    return_token_ids: bool
    include_usage: bool


@dataclass(slots=True)
class FullChoice:
    """A finished choice, gathered from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason or self.finish_reason


def usage(account: Account) -> Json:
    """The `usage` object; `cached_tokens` is always there, also when it is 0."""
    return {"prompt_tokens": account.prompt_tokens, "completion_tokens": account.completion_tokens,
            "total_tokens": account.prompt_tokens + account.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": account.cached_tokens}}


class ResponseFormat(ABC):
    """The shared skeleton of both APIs' objects."""

    prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(self, head: ResponseHead, token_text: TokenText) -> None:
        self._head = head
        self._token_text = token_text
        self._chunk_head = self._object(self.chunk_object_name)

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """The stream chunks for one delta: none when it would say nothing."""
        said_nothing = not delta.text and delta.finish_reason is None and delta.logprobs is None
        if said_nothing and not self._head.return_token_ids:
            return []
        return [self._chunk([self._chunk_choice(delta)])]

    def usage_chunk(self, account: Account) -> Json:
        """The last chunk of a stream that asked for usage: no choices."""
        return {**self._chunk_head, "choices": [], "usage": usage(account)}

    def full(self, choices: Sequence[FullChoice], account: Account) -> Json:
        """The one object of a request that does not stream."""
        items = [self._full_choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._object(self.object_name), "choices": items, "usage": usage(account)}

    def _object(self, name: str) -> Json:
        head = self._head
        return {"id": self.prefix + head.request_id, "object": name, "created": head.created, "model": head.model,
                "system_fingerprint": head.system_fingerprint}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._chunk_head, "choices": choices}
        if self._head.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_token_ids(self, choice: Json, token_ids: Iterable[int]) -> Json:
        if self._head.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    @abstractmethod
    def _chunk_choice(self, delta: ChoiceDelta) -> Json: ...

    @abstractmethod
    def _full_choice(self, index: int, choice: FullChoice) -> Json: ...


class ChatFormat(ResponseFormat):
    """`chat.completion` and `chat.completion.chunk`."""

    prefix, object_name, chunk_object_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, head: ResponseHead, token_text: TokenText) -> None:
        super().__init__(head, token_text)
        self._has_role: set[int] = set()

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """As in the base, and before a choice's first the chunk that names its role."""
        rest = super().chunks(delta)
        if delta.choice in self._has_role:
            return rest
        self._has_role.add(delta.choice)
        opening = {"index": delta.choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                   "finish_reason": None}
        return [self._chunk([self._with_token_ids(opening, ())]), *rest]

    def _chunk_choice(self, delta: ChoiceDelta) -> Json:
        choice = {"index": delta.choice, "delta": {"content": delta.text} if delta.text else {},
                  "logprobs": self._logprobs(delta.token_ids, delta.logprobs), "finish_reason": delta.finish_reason}
        return self._with_token_ids(choice, delta.token_ids)

    def _full_choice(self, index: int, choice: FullChoice) -> Json:
        item = {"index": index, "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs), "finish_reason": choice.finish_reason}
        return self._with_token_ids(item, choice.token_ids)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": [{**self._token(token_id, item.logprob),
                             "top_logprobs": [self._token(other, logprob) for other, logprob in item.top]}
                            for token_id, item in zip(token_ids, logprobs, strict=True)], "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {"token": self._token_text.text_of(token_id), "logprob": max(logprob, LOGPROB_MIN),
                "bytes": list(self._token_text.bytes_of(token_id))}


class CompletionFormat(ResponseFormat):
    """`text_completion`, whole and in chunks."""

    prefix, object_name, chunk_object_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, head: ResponseHead, token_text: TokenText) -> None:
        super().__init__(head, token_text)
        self._text_offsets: defaultdict[int, int] = defaultdict(int)
        self._decoders: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(
            partial(codecs.getincrementaldecoder("utf-8"), "replace"))

    def _chunk_choice(self, delta: ChoiceDelta) -> Json:
        choice = {"index": delta.choice, "text": delta.text, "finish_reason": delta.finish_reason,
                  "logprobs": self._logprobs(delta.choice, delta.token_ids, delta.logprobs)}
        return self._with_token_ids(choice, delta.token_ids)

    def _full_choice(self, index: int, choice: FullChoice) -> Json:
        item = {"index": index, "text": choice.text, "finish_reason": choice.finish_reason,
                "logprobs": self._logprobs(index, choice.token_ids, choice.logprobs)}
        return self._with_token_ids(item, choice.token_ids)

    def _logprobs(self, index: int, token_ids: Sequence[int],
                  logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        tokens, offsets = [], []
        for token_id in token_ids:
            text = self._token_text.escaped_text_of(token_id)
            tokens.append(text)
            offsets.append(self._text_offsets[index])
            added = self._token_text.added_bytes_of(token_id)
            self._text_offsets[index] += len(self._decoders[index].decode(added))
        top = [{self._token_text.escaped_text_of(other): max(logprob, LOGPROB_MIN) for other, logprob in item.top}
               for item in logprobs]
        return {"tokens": tokens, "token_logprobs": [max(item.logprob, LOGPROB_MIN) for item in logprobs],
                "top_logprobs": top, "text_offset": offsets}
