"""Chat answers as Anthropic's messages, whole and in events.

Owns their shapes and the order of a stream's events. A whole message is what its stream adds up to. Known
approximations: an answer that an operator aborted counts as cut off (`max_tokens`), and which stop sequence ended an
answer is known only from engines that say (ours and vLLM do).
"""

from __future__ import annotations

from typing import Any

import msgspec

from worker.prompt.chat_answer import calls_of, only_choice, usage_of
from worker.prompt.foreign_api import Event, ForeignStream, Json, PromptCount
from worker.protocol.api_error import ApiError

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal",
            "abort": "max_tokens"}
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
                504: "timeout_error"}


def messages_error(error: ApiError) -> Json:
    """Anthropic's error object. It keeps `param` and `code` of ours, which its clients pass over."""
    told: Any = ApiError.body(error)["error"]
    return {"type": "error", "error": {**told, "type": _error_type(error.status)}}


def _error_type(status: int) -> str:
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


class MessagesAnswer:
    """See ForeignAnswer."""

    def __init__(self, model: str) -> None:
        self._model = model

    def whole(self, chat: Json) -> Json:
        """See ForeignAnswer."""
        stream = MessagesStream(self._model, PromptCount())
        stream.whole(chat)
        return stream.message()

    def stream(self, prompt: PromptCount) -> ForeignStream:
        """See ForeignAnswer."""
        return MessagesStream(self._model, prompt)


class MessagesStream:
    """message_start, ping, then content blocks one after the other, message_delta, message_stop."""

    def __init__(self, model: str, prompt: PromptCount) -> None:
        self._model = model
        self._id = "msg_"
        self._usage = _usage(prompt.tokens, prompt.cached, 0)
        self._reason: str | None = None
        self._stop_sequence: str | None = None
        self._blocks: list[Json] = []
        self._open_call: int | None = None
        self._has_begun = False
        self._is_block_open = False

    def chunk(self, chunk: Json) -> list[Event]:
        """See ForeignStream."""
        events = [] if self._has_begun else self._begin(chunk)
        self._take_usage(chunk)
        choice = only_choice(chunk)
        delta = choice.get("delta") or {}
        if delta.get("content"):
            events += self._text(delta["content"])
        for call in calls_of(delta):
            events += self._call(call)
        if choice.get("finish_reason") is not None:
            self._finish(choice)
        return events

    def keep_alive(self) -> Event | None:
        """See ForeignStream."""
        return Event("ping", {"type": "ping"}) if self._has_begun else None

    def done(self) -> list[Event]:
        """See ForeignStream."""
        events = self._begin({}) if not self._has_begun else []
        return [*events, *self._close(),
                Event("message_delta", {"type": "message_delta", "delta": self._end(), "usage": self._usage}),
                Event("message_stop", {"type": "message_stop"})]

    def failed(self, error: ApiError) -> list[Event]:
        """See ForeignStream."""
        return [Event("error", messages_error(error))]

    def whole(self, chat: Json) -> None:
        """Take a whole answer as one chunk."""
        choice = only_choice(chat)
        self.chunk({**chat, "choices": [{**choice, "delta": choice.get("message") or {}}]})
        self._close()

    def message(self) -> Json:
        """What has come so far."""
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model,
                "content": [self._finished(block) for block in self._blocks], **self._end(), "usage": self._usage}

    def _begin(self, chunk: Json) -> list[Event]:
        self._has_begun = True
        self._id = "msg_" + str(chunk.get("id") or "").removeprefix("chatcmpl-")
        return [Event("message_start", {"type": "message_start", "message": self.message()}),
                Event("ping", {"type": "ping"})]

    def _take_usage(self, chunk: Json) -> None:
        if (usage := usage_of(chunk)) is not None:
            self._usage = _usage(usage.prompt, usage.cached, usage.completion)

    def _finish(self, choice: Json) -> None:
        self._reason = _REASONS.get(choice["finish_reason"], "end_turn")
        if self._reason == "end_turn" and isinstance(choice.get("stop_reason"), str):
            self._reason, self._stop_sequence = "stop_sequence", choice["stop_reason"]

    def _text(self, text: str) -> list[Event]:
        events = []
        if not self._is_block_open or self._open_call is not None:
            events = [*self._close(), *self._open({"type": "text", "text": ""})]
        self._blocks[-1]["text"] += text
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def _call(self, call: Json) -> list[Event]:
        events = []
        if not self._is_block_open or self._open_call != call["index"]:
            events = [*self._close(), *self._open(
                {"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}})]
            self._open_call = call["index"]
            self._blocks[-1]["json"] = ""
        if call["arguments"]:
            self._blocks[-1]["json"] += call["arguments"]
            events.append(self._delta({"type": "input_json_delta", "partial_json": call["arguments"]}))
        return events

    def _open(self, block: Json) -> list[Event]:
        self._blocks.append(dict(block))
        self._is_block_open = True
        return [Event("content_block_start", {"type": "content_block_start", "index": len(self._blocks) - 1,
                                              "content_block": block})]

    def _delta(self, delta: Json) -> Event:
        return Event("content_block_delta", {"type": "content_block_delta", "index": len(self._blocks) - 1,
                                             "delta": delta})

    def _close(self) -> list[Event]:
        if not self._is_block_open:
            return []
        self._is_block_open, self._open_call = False, None
        return [Event("content_block_stop", {"type": "content_block_stop", "index": len(self._blocks) - 1})]

    def _end(self) -> Json:
        return {"stop_reason": self._reason, "stop_sequence": self._stop_sequence}

    @staticmethod
    def _finished(block: Json) -> Json:
        if "json" not in block:
            return dict(block)
        return {**{name: value for name, value in block.items() if name != "json"}, "input": _input(block["json"])}


def _input(arguments: str) -> Json:
    """An engine may write arguments that are no object; they are shown as they came."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": arguments}


def _usage(prompt: int, cached: int, completion: int) -> Json:
    """Anthropic counts cached tokens apart from the others."""
    return {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
            "output_tokens": completion}
