"""What a chat message, a tool and template arguments must look like before a template sees them.

Owns the shape of `messages`, `tools` and `chat_template_kwargs`; they stay plain dicts, since templates read fields
that no schema lists. Must never change what a message says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.protocol.api_error import invalid_request

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 16_384
MAX_PARTS = 4_096
MAX_TOOLS = 1_024
RESERVED_TEMPLATE_KWARGS = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"))
_OTHER_PARTS = frozenset(("image_url", "input_image", "image", "input_audio", "audio", "video_url", "video", "file"))


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """ApiError 400 with param `messages[i]...` unless every message has a known role and fitting content."""
    if not messages:
        raise invalid_request("messages must hold at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid_request(f"messages holds {len(messages)} messages; at most {MAX_MESSAGES} are accepted.",
                              "messages")
    for index, message in enumerate(messages):
        if not _is_plain(message):
            _check_message(message, f"messages[{index}]")


def are_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each is nothing but a role and a text, as most are: there is nothing else to check."""
    return 0 < len(messages) <= MAX_MESSAGES and all(map(_is_plain, messages))


def _is_plain(message: Mapping[str, Any]) -> bool:
    return len(message) == 2 and message.get("role") in ROLES and type(message.get("content")) is str


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """ApiError 400 unless every tool is {"type": "function", "function": {"name", ...}}."""
    if not tools:
        raise invalid_request("tools must hold at least one tool, or be left out.", "tools")
    if len(tools) > MAX_TOOLS:
        raise invalid_request(f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are accepted.", "tools")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.get("type") != "function":
            raise invalid_request(f"{path}.type must be \"function\".", f"{path}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid_request(f"{path}.function must be an object.", f"{path}.function")
        _require_text(function, "name", f"{path}.function", allow_empty=False)
        _optional(function, "description", str, f"{path}.function")
        _optional(function, "parameters", dict, f"{path}.function")


def check_chat_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """ApiError 400 for a name that the renderer itself passes to the template."""
    for name in kwargs:
        if name in RESERVED_TEMPLATE_KWARGS:
            raise invalid_request(f"chat_template_kwargs may not set {name}: send it as a field of the request.",
                                  f"chat_template_kwargs.{name}")


def _check_message(message: Mapping[str, Any], path: str) -> None:
    role = message.get("role")
    if not isinstance(role, str):
        raise invalid_request(f"{path}.role must be a string.", f"{path}.role")
    if role not in ROLES:
        raise invalid_request(f"Unknown role {role[:64]!r} in {path}; expected one of {', '.join(ROLES)}.",
                              f"{path}.role")
    _optional(message, "name", str, path)
    tool_calls = message.get("tool_calls")
    if tool_calls is not None:
        if role != "assistant":
            raise invalid_request(f"{path}.tool_calls belongs to the assistant role only.", f"{path}.tool_calls")
        _check_tool_calls(tool_calls, f"{path}.tool_calls")
    if role == "tool":
        _optional(message, "tool_call_id", str, path)
    _check_content(message.get("content"), f"{path}.content", may_be_absent=bool(tool_calls))


def _check_content(content: object, path: str, *, may_be_absent: bool) -> None:
    if isinstance(content, str) or (content is None and may_be_absent):
        return
    if content is None:
        raise invalid_request(f"{path} is required: a string or a list of text parts.", path)
    if not isinstance(content, list):
        raise invalid_request(f"{path} must be a string or a list of text parts.", path)
    if not content or len(content) > MAX_PARTS:
        raise invalid_request(f"{path} must hold 1 to {MAX_PARTS} parts, not {len(content)}.", path)
    for index, part in enumerate(content):
        _check_part(part, f"{path}[{index}]")


def _check_part(part: object, path: str) -> None:
    if not isinstance(part, dict):
        raise invalid_request(f"{path} must be an object such as {{\"type\": \"text\", \"text\": \"...\"}}.", path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise invalid_request(f"{path}.type must be a string.", f"{path}.type")
    if kind in _OTHER_PARTS:
        raise invalid_request(f"{path} is of type {kind!r}, but this model reads text only.", path)
    if kind != "text":
        raise invalid_request(f"{path} is of unknown type {kind[:64]!r}; expected 'text'.", path)
    _require_text(part, "text", path)


def _check_tool_calls(calls: object, path: str) -> None:
    if not isinstance(calls, list) or not calls:
        raise invalid_request(f"{path} must be a list of at least one call, or be left out.", path)
    if len(calls) > MAX_TOOLS:
        raise invalid_request(f"{path} holds {len(calls)} calls; at most {MAX_TOOLS} are accepted.", path)
    for index, call in enumerate(calls):
        here = f"{path}[{index}]"
        if not isinstance(call, dict):
            raise invalid_request(f"{here} must be an object.", here)
        _optional(call, "id", str, here)
        if call.get("type", "function") != "function":
            raise invalid_request(f"{here}.type must be \"function\".", f"{here}.type")
        function = call.get("function")
        if not isinstance(function, dict):
            raise invalid_request(f"{here}.function must be an object.", f"{here}.function")
        _require_text(function, "name", f"{here}.function", allow_empty=False)
        # OpenAI sends JSON text; an object is what templates' own examples use.
        if not isinstance(function.get("arguments"), str | dict):
            raise invalid_request(f"{here}.function.arguments must be a string of JSON.",
                                  f"{here}.function.arguments")


def _require_text(holder: Mapping[str, Any], name: str, path: str, *, allow_empty: bool = True) -> None:
    value = holder.get(name)
    if not isinstance(value, str) or not (value or allow_empty):
        wanted = "a string" if allow_empty else "a non-empty string"
        raise invalid_request(f"{path}.{name} must be {wanted}.", f"{path}.{name}")


def _optional(holder: Mapping[str, Any], name: str, kind: type, path: str) -> None:
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        wanted = "a string" if kind is str else "an object"
        raise invalid_request(f"{path}.{name} must be {wanted}.", f"{path}.{name}")
