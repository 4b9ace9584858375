"""What a chat answer says, read from whatever engine wrote it: its one choice, its tool calls, its usage.

Owns the reading of chat objects for translations. Fields that an engine leaves out count as empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]


class ChatUsage(NamedTuple):
    """Token counts; cached ones are 0 where the engine does not say."""

    prompt: int
    cached: int
    completion: int


def only_choice(chunk: Json) -> Json:
    """The first choice; {} in a chunk that has none."""
    choices = chunk.get("choices") or [{}]
    return dict(choices[0])


def calls_of(delta: Json) -> list[Json]:
    """The tool calls of a delta or a message as {index, id, name, arguments}; what a delta leaves out is ""."""
    calls = []
    for position, call in enumerate(delta.get("tool_calls") or []):
        function = call.get("function") or {}
        calls.append({"index": call.get("index", position), "id": call.get("id") or "",
                      "name": function.get("name") or "", "arguments": function.get("arguments") or ""})
    return calls


def usage_of(chunk: Json) -> ChatUsage | None:
    """The usage of an answer or of a stream's last chunk."""
    usage = chunk.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return ChatUsage(int(usage.get("prompt_tokens") or 0), int(details.get("cached_tokens") or 0),
                     int(usage.get("completion_tokens") or 0))
