"""Chat answers as OpenAI's responses, whole and in events.

Owns their shapes, the order of a stream's events and their numbers. A whole response is the one that its stream
would end with. Known approximation: an answer that an operator aborted counts as cut off by `max_output_tokens`.
"""

from __future__ import annotations

import time
from typing import Any

from worker.prompt.chat_answer import calls_of, only_choice, usage_of
from worker.prompt.foreign_api import Event, ForeignStream, Json, PromptCount
from worker.protocol.api_error import ApiError

_CUT_OFF = {"length": "max_output_tokens", "abort": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesAnswer:
    """See ForeignAnswer. `echoed` are the fields that a response repeats of its request."""

    def __init__(self, echoed: Json, *, has_logprobs: bool) -> None:
        self._echoed = echoed
        self._has_logprobs = has_logprobs

    def whole(self, chat: Json) -> Json:
        """See ForeignAnswer."""
        stream = ResponsesStream(self._echoed, has_logprobs=self._has_logprobs)
        choice = only_choice(chat)
        stream.chunk({**chat, "choices": [{**choice, "delta": choice.get("message") or {}}]})
        last = stream.done()[-1]
        response: Json = last.data["response"]
        return response

    def stream(self, prompt: PromptCount) -> ForeignStream:
        """See ForeignAnswer. OpenAI's first events have no usage."""
        return ResponsesStream(self._echoed, has_logprobs=self._has_logprobs)


class ResponsesStream:
    """response.created, response.in_progress, then output items one after the other, response.completed."""

    def __init__(self, echoed: Json, *, has_logprobs: bool) -> None:
        self._echoed = echoed
        self._has_logprobs = has_logprobs
        self._suffix = ""
        self._created_at = 0
        self._usage: Json | None = None
        self._cut_off: str | None = None
        self._items: list[Json] = []
        self._open_call: int | None = None
        self._num_events = 0
        self._has_begun = False
        self._is_item_open = False

    def chunk(self, chunk: Json) -> list[Event]:
        """See ForeignStream."""
        events = [] if self._has_begun else self._begin(chunk)
        if (usage := usage_of(chunk)) is not None:
            self._usage = {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion}
        choice = only_choice(chunk)
        delta = choice.get("delta") or {}
        logprobs = self._logprobs(choice)
        if delta.get("content") or logprobs:
            events += self._text(delta.get("content") or "", logprobs)
        for call in calls_of(delta):
            events += self._call(call)
        self._cut_off = _CUT_OFF.get(choice.get("finish_reason") or "", self._cut_off)
        return events

    def keep_alive(self) -> Event | None:
        """See ForeignStream."""
        return None

    def done(self) -> list[Event]:
        """See ForeignStream."""
        status = "completed" if self._cut_off is None else "incomplete"
        events = [] if self._has_begun else self._begin({})
        return [*events, *self._close(status), self._lifecycle(status)]

    def failed(self, error: ApiError) -> list[Event]:
        """See ForeignStream."""
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        if not self._has_begun:
            return [told]
        return [told, self._lifecycle("failed", error={"code": "server_error", "message": error.message})]

    def _begin(self, chunk: Json) -> list[Event]:
        self._has_begun = True
        self._suffix = str(chunk.get("id") or "").removeprefix("chatcmpl-")
        self._created_at = int(chunk.get("created") or time.time())
        return [self._lifecycle("in_progress", name="created"), self._lifecycle("in_progress")]

    def _lifecycle(self, status: str, *, name: str | None = None, error: Json | None = None) -> Event:
        details = {"reason": self._cut_off} if status == "incomplete" else None
        is_over = status != "in_progress"
        response = {"id": f"resp_{self._suffix}", "object": "response", "created_at": self._created_at,
                    "completed_at": int(time.time()) if status == "completed" else None, "status": status,
                    "error": error, "incomplete_details": details, **self._echoed,
                    "output": [self._told(item) for item in self._items] if is_over else [],
                    "usage": self._usage if is_over else None}
        return self._event(f"response.{name or status}", response=response)

    def _logprobs(self, choice: Json) -> list[Json]:
        content = (choice.get("logprobs") or {}).get("content") if self._has_logprobs else None
        return content or []

    def _text(self, text: str, logprobs: list[Json]) -> list[Event]:
        events = []
        if not self._is_item_open or self._open_call is not None:
            events = [*self._close("completed"), *self._open_message()]
        part = self._items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return [*events, self._event("response.output_text.delta", **self._part_place(), delta=text,
                                     logprobs=logprobs)]

    def _open_message(self) -> list[Event]:
        item: Json = {"id": f"msg_{self._suffix}_{len(self._items)}", "type": "message", "status": "in_progress",
                      "role": "assistant", "content": []}
        added = self._open(item)
        self._items[-1]["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        return [*added, self._event("response.content_part.added", **self._part_place(), part={
            "type": "output_text", "text": "", "annotations": [], "logprobs": []})]

    def _call(self, call: Json) -> list[Event]:
        events = []
        if not self._is_item_open or self._open_call != call["index"]:
            events = [*self._close("completed"), *self._open({
                "id": f"fc_{self._suffix}_{len(self._items)}", "type": "function_call", "status": "in_progress",
                "call_id": call["id"], "name": call["name"], "arguments": ""})]
            self._open_call = call["index"]
        if call["arguments"]:
            self._items[-1]["arguments"] += call["arguments"]
            events.append(self._event("response.function_call_arguments.delta", **self._place(),
                                      delta=call["arguments"]))
        return events

    def _open(self, item: Json) -> list[Event]:
        self._items.append(dict(item))
        self._is_item_open = True
        return [self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)]

    def _close(self, status: str) -> list[Event]:
        if not self._is_item_open:
            return []
        item = self._items[-1]
        item["status"] = status
        events = []
        if item["type"] == "message":
            part = self._told(item)["content"][0]
            events += [self._event("response.output_text.done", **self._part_place(), text=part["text"],
                                   logprobs=part["logprobs"]),
                       self._event("response.content_part.done", **self._part_place(), part=part)]
        else:
            events.append(self._event("response.function_call_arguments.done", **self._place(), name=item["name"],
                                      arguments=item["arguments"]))
        self._is_item_open, self._open_call = False, None
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1,
                                     item=self._told(item))]

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _part_place(self) -> Json:
        return {**self._place(), "content_index": 0}

    @staticmethod
    def _told(item: Json) -> Json:
        """A copy that later chunks do not change."""
        if item["type"] != "message":
            return dict(item)
        return {**item, "content": [{**part, "logprobs": list(part["logprobs"])} for part in item["content"]]}

    def _event(self, name: str, /, **fields: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return Event(name, {"type": name, "sequence_number": number, **fields})
