"""OpenAI's objects for chat and plain completions: full responses, stream chunks, usage, log-probabilities.

Pure: values in, JSON-ready dicts out. Owns the shapes; never touches a socket or the engine. A format object belongs
to one request and remembers what the next chunk depends on (text offsets, which choices have had their role chunk).
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from worker.core.batch import ScoredToken, TokenLogprobs
from worker.prompt.tool_parser import ToolCall
from worker.prompt.tool_style import HERMES, ToolStyle
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
    tool_style: ToolStyle = HERMES
    response_id: str | None = None    # of a resumed answer, which keeps it


class ScoredPrompt(NamedTuple):
    """A prompt's tokens and what the model thought of each but the first, for those who asked: `num_shown`
    alternatives as vLLM's `prompt_logprobs`, `num_echoed` in the log-probabilities of an echo; None: not there."""

    token_ids: Sequence[int]
    scores: Sequence[ScoredToken]
    num_shown: int | None
    num_echoed: int | None


@dataclass(slots=True)
class FullChoice:
    """A finished choice, gathered from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_string: str | None = None
    prompt: ScoredPrompt | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.tool_calls.extend(delta.tool_calls)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_string = delta.stop_string or self.stop_string


def best_choices(choices: Sequence[FullChoice], num_candidates: int, n: int, *,
                 keep_logprobs: bool) -> list[FullChoice]:
    """Of each prompt's `num_candidates` choices the `n` with the highest log-probability per token, best first."""
    best: list[FullChoice] = []
    for start in range(0, len(choices), num_candidates):
        best += sorted(choices[start:start + num_candidates], key=_mean_logprob, reverse=True)[:n]
    for choice in best:
        choice.logprobs = choice.logprobs if keep_logprobs else None
    return best


def _mean_logprob(choice: FullChoice) -> float:
    logprobs = [item.logprob for item in choice.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else LOGPROB_MIN


def embedding_list(vectors: Sequence[Sequence[float]], *, as_base64: bool) -> list[Json]:
    """`embedding` objects of length 1, as numbers or as little-endian float32 in base64."""
    items: list[Json] = []
    for index, vector in enumerate(vectors):
        length = math.hypot(*vector) or 1.0
        values = [value / length for value in vector]
        shown: Any = values
        if as_base64:
            shown = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        items.append({"object": "embedding", "index": index, "embedding": shown})
    return items


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
        self._response_id = head.response_id or self.prefix + head.request_id
        self._token_text = token_text
        self._chunk_head = self._object(self.chunk_object_name)

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """The stream chunks for one delta: none when it would say nothing."""
        said_nothing = not (delta.text or delta.tool_calls) and delta.finish_reason is None and delta.logprobs is None
        if said_nothing and not self._head.return_token_ids:
            return []
        return [self._chunk([self._chunk_choice(delta)])]

    @abstractmethod
    def resumed(self, choice: int, token_ids: Sequence[int], *, has_role: bool = True) -> None:
        """These tokens of a choice were told by another worker, and the chunk with its role: go on as if by us."""

    def ending(self, account: Account) -> list[Json]:
        """What follows the last choice's last chunk: usage, without choices, where it was asked for."""
        if not self._head.include_usage:
            return []
        return [{**self._chunk_head, "choices": [], "usage": usage(account)}]

    def full(self, choices: Sequence[FullChoice], account: Account) -> Json:
        """The one object of a request that does not stream."""
        items = [self._full_choice(index, choice) for index, choice in enumerate(choices)]
        answer = {**self._object(self.object_name), "choices": items, "usage": usage(account)}
        self._show_prompt(answer, choices)
        return answer

    @abstractmethod
    def _show_prompt(self, answer: Json, choices: Sequence[FullChoice]) -> None:
        """`prompt_logprobs` where vLLM has them."""

    def _prompt_logprobs(self, prompt: ScoredPrompt) -> list[Json | None]:
        """Per token its own log-probability and those of the alternatives, by token id; nothing of the first."""
        shown: list[Json | None] = [None]
        for token_id, scored in zip(prompt.token_ids[1:], prompt.scores, strict=True):
            ranked = [(other, logprob, rank) for rank, (other, logprob) in
                      enumerate(scored.top[:prompt.num_shown], start=1)]
            shown.append({str(other): {"logprob": max(logprob, LOGPROB_MIN), "rank": rank,
                                       "decoded_token": self._token_text.text_of(other)}
                          for other, logprob, rank in (*ranked, (token_id, scored.logprob, scored.rank))})
        return shown

    def _object(self, name: str) -> Json:
        head = self._head
        return {"id": self._response_id, "object": name, "created": head.created, "model": head.model,
                "system_fingerprint": head.system_fingerprint}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._chunk_head, "choices": choices}
        if self._head.include_usage:
            chunk["usage"] = None
        return chunk

    def _completed(self, choice: Json, token_ids: Iterable[int], stop_string: str | None = None) -> Json:
        """A choice with what only some have: the ids that were asked for, the stop string it met (vLLM's name)."""
        if self._head.return_token_ids:
            choice["token_ids"] = list(token_ids)
        if stop_string is not None:
            choice["stop_reason"] = stop_string
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
        return [self._chunk([self._completed(opening, ())]), *rest]

    def resumed(self, choice: int, token_ids: Sequence[int], *, has_role: bool = True) -> None:
        if has_role:
            self._has_role.add(choice)

    def _chunk_choice(self, delta: ChoiceDelta) -> Json:
        said: Json = {"content": delta.text} if delta.text else {}
        if delta.tool_calls:
            said["tool_calls"] = [{"index": call.index, **self._tool_call(delta.choice, call)}
                                  for call in delta.tool_calls]
        choice = {"index": delta.choice, "delta": said,
                  "logprobs": self._logprobs(delta.token_ids, delta.logprobs), "finish_reason": delta.finish_reason}
        return self._completed(choice, delta.token_ids, delta.stop_string)

    def _full_choice(self, index: int, choice: FullChoice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [self._tool_call(index, call) for call in choice.tool_calls]
        item = {"index": index, "message": message, "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": choice.finish_reason}
        return self._completed(item, choice.token_ids, choice.stop_string)

    def _show_prompt(self, answer: Json, choices: Sequence[FullChoice]) -> None:
        prompt = choices[0].prompt
        if prompt is not None and prompt.num_shown is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(prompt)

    def _tool_call(self, choice: int, call: ToolCall) -> Json:
        """Its id is a function of where it stands, so that an answer that moves to another worker keeps it."""
        style = self._head.tool_style
        digest = hashlib.sha256(f"{self._response_id}/{choice}/{call.index}".encode()).hexdigest()
        return {"id": style.call_id_prefix + digest[:style.call_id_chars], "type": "function",
                "function": {"name": call.name, "arguments": call.arguments}}

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

    def resumed(self, choice: int, token_ids: Sequence[int], *, has_role: bool = True) -> None:
        for token_id in token_ids:
            self._advance(choice, token_id)

    def _advance(self, choice: int, token_id: int) -> None:
        self._text_offsets[choice] += len(self._decoders[choice].decode(self._token_text.added_bytes_of(token_id)))

    def _chunk_choice(self, delta: ChoiceDelta) -> Json:
        choice = {"index": delta.choice, "text": delta.text, "finish_reason": delta.finish_reason,
                  "logprobs": self._logprobs(delta.choice, delta.token_ids, delta.logprobs)}
        return self._completed(choice, delta.token_ids, delta.stop_string)

    def _full_choice(self, index: int, choice: FullChoice) -> Json:
        item = {"index": index, "text": choice.text, "finish_reason": choice.finish_reason,
                "logprobs": self._with_prompt(index, choice)}
        return self._completed(item, choice.token_ids, choice.stop_string)

    def _show_prompt(self, answer: Json, choices: Sequence[FullChoice]) -> None:
        for item, choice in zip(answer["choices"], choices, strict=True):
            if choice.prompt is not None and choice.prompt.num_shown is not None:
                item["prompt_logprobs"] = self._prompt_logprobs(choice.prompt)

    def _with_prompt(self, index: int, choice: FullChoice) -> Json | None:
        """The log-probabilities of an echoed prompt before the answer's; nothing is known of the first token."""
        prompt = choice.prompt
        if prompt is None or prompt.num_echoed is None:
            return self._logprobs(index, choice.token_ids, choice.logprobs)
        scores = [TokenLogprobs(scored.logprob, scored.top[:prompt.num_echoed]) for scored in prompt.scores]
        first = self._logprobs(index, prompt.token_ids[:1], [TokenLogprobs(0.0)]) or {}
        first |= {"token_logprobs": [None], "top_logprobs": [None]}
        for part in (self._logprobs(index, prompt.token_ids[1:], scores),
                     self._logprobs(index, choice.token_ids, choice.logprobs)):
            first = {name: [*first[name], *(part or {}).get(name, [])] for name in first}
        return first

    def _logprobs(self, index: int, token_ids: Sequence[int],
                  logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        tokens, offsets = [], []
        for token_id in token_ids:
            text = self._token_text.escaped_text_of(token_id)
            tokens.append(text)
            offsets.append(self._text_offsets[index])
            self._advance(index, token_id)
        top = [{self._token_text.escaped_text_of(other): max(logprob, LOGPROB_MIN) for other, logprob in item.top}
               for item in logprobs]
        return {"tokens": tokens, "token_logprobs": [max(item.logprob, LOGPROB_MIN) for item in logprobs],
                "top_logprobs": top, "text_offset": offsets}
