"""Anthropic's POST /v1/messages bodies as chat bodies.

Owns the meaning of their fields. Every complaint is a 400 that names the field as the client wrote it. Accepted and
without effect: `cache_control` (every prompt is cached), `service_tier`, `metadata` but its `user_id`, thinking
blocks of earlier turns, and a thinking budget. Text only: images and documents are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from worker.prompt.foreign_api import (
    ForeignApi,
    ForeignBody,
    Json,
    Translated,
    content_of,
    given_extras,
    list_at,
    object_at,
    text_of,
)
from worker.prompt.json_body import decode_body
from worker.prompt.messages_answer import MessagesAnswer, messages_error
from worker.prompt.request_schema import TokenCount
from worker.protocol.api_error import invalid_request

_ROLES = ("user", "assistant", "system")
_REFUSED = ("container", "mcp_servers", "context_management")
_THINKING = ("thinking", "redacted_thinking")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(ForeignBody, kw_only=True):
    max_tokens: TokenCount
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None


class CountBody(MessagesBody, kw_only=True):
    """POST /v1/messages/count_tokens: the same without an answer."""

    max_tokens: TokenCount = 1


_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


def messages_to_chat(body: bytes) -> Translated:
    """ApiError 400 that names the field."""
    return _translated(decode_body(body, _decoder).value)


def count_to_chat(body: bytes) -> Translated:
    """As messages_to_chat; the chat body is for rendering only."""
    return _translated(decode_body(body, _count_decoder).value)


def _translated(given: MessagesBody) -> Translated:
    for name in _REFUSED:
        if getattr(given, name):
            raise invalid_request(f"{name} is not supported: this server keeps no state and runs no tools.", name)
    stops = given.stop_sequences or []
    chat: Json = {"model": given.model, "max_tokens": given.max_tokens, "stream": bool(given.stream),
                  "messages": _messages(given), **given_extras(given), **_tools(given), **_form(given)}
    chat |= {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(given, name)) is not None}
    if stops:
        chat["stop"] = stops
    if given.stream:
        chat["stream_options"] = {"include_usage": True}
    if given.metadata is not None and given.metadata.get("user_id") is not None:
        chat["user"] = given.metadata["user_id"]
    if given.thinking is not None:
        chat |= _thinking(given.thinking, given.chat_template_kwargs)
    if chat["messages"][-1]["role"] == "assistant":  # the answer goes on where the client left it
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return Translated(chat, MessagesAnswer(given.model))


def _messages(given: MessagesBody) -> list[Json]:
    messages: list[Json] = []
    if given.system:
        texts = [given.system] if isinstance(given.system, str) else _texts(given.system, "system")
        messages.append({"role": "system", "content": content_of(texts)})
    if not given.messages:
        raise invalid_request("messages must hold at least one message.", "messages")
    for index, message in enumerate(list_at(given.messages, "messages")):
        path = f"messages[{index}]"
        role = text_of(message, "role", path)
        if role not in _ROLES:
            raise invalid_request(f"{path}.role must be one of {', '.join(_ROLES)}.", f"{path}.role")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        blocks = [object_at(block, f"{path}.content[{number}]")
                  for number, block in enumerate(list_at(content, f"{path}.content"))]
        said = (_assistant if role == "assistant" else _user)(blocks, f"{path}.content", role)
        if not said:
            raise invalid_request(f"{path}.content says nothing.", f"{path}.content")
        messages += said
    final = messages[-1]
    if final["role"] == "assistant" and final.get("tool_calls"):
        raise invalid_request("The last message calls a tool: send its tool_result in a user message.", "messages")
    return messages


def _user(blocks: list[Mapping[str, Any]], path: str, role: str) -> list[Json]:
    """Texts that stand together are one message; a tool's result is one of its own."""
    messages: list[Json] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        here = f"{path}[{index}]"
        match text_of(block, "type", here):
            case "text":
                texts.append(text_of(block, "text", here))
            case "tool_result" if role == "user":
                messages += _message_of(role, texts)
                texts = []
                messages.append({"role": "tool", "tool_call_id": text_of(block, "tool_use_id", here),
                                 "content": _result(block, here)})
            case other:
                raise _unknown_block(other, here)
    return messages + _message_of(role, texts)


def _assistant(blocks: list[Mapping[str, Any]], path: str, role: str) -> list[Json]:
    texts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        here = f"{path}[{index}]"
        match text_of(block, "type", here):
            case "text":
                texts.append(text_of(block, "text", here))
            case "tool_use":
                arguments = json.dumps(object_at(block.get("input"), f"{here}.input"), ensure_ascii=False)
                calls.append({"id": text_of(block, "id", here), "type": "function", "function": {
                    "name": text_of(block, "name", here), "arguments": arguments}})
            case kind if kind in _THINKING:
                continue
            case other:
                raise _unknown_block(other, here)
    if not calls:
        return _message_of(role, texts)
    return [{"role": role, "content": content_of(texts) if texts else None, "tool_calls": calls}]


def _message_of(role: str, texts: list[str]) -> list[Json]:
    return [{"role": role, "content": content_of(texts)}] if texts else []


def _result(block: Mapping[str, Any], path: str) -> str | list[Json]:
    content = block.get("content")
    if content is None or content == []:
        return ""
    if isinstance(content, str):
        return content
    return content_of(_texts(list_at(content, f"{path}.content"), f"{path}.content"))


def _texts(blocks: list[Any], path: str) -> list[str]:
    texts = []
    for index, block in enumerate(list_at(blocks, path)):
        here = f"{path}[{index}]"
        kind = text_of(object_at(block, here), "type", here)
        if kind != "text":
            raise _unknown_block(kind, here)
        texts.append(text_of(block, "text", here))
    return texts


def _unknown_block(kind: str, path: str) -> Exception:
    return invalid_request(f"{path} is of type {kind[:64]!r}, which has no place here: this model reads text.", path)


def _tools(given: MessagesBody) -> Json:
    chat: Json = {}
    if given.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(list_at(given.tools, "tools"))]
    if given.tool_choice is not None:
        kind = text_of(given.tool_choice, "type", "tool_choice")
        if kind == "tool":
            name = text_of(given.tool_choice, "name", "tool_choice")
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif kind in _CHOICES:
            chat["tool_choice"] = _CHOICES[kind]
        else:
            raise invalid_request("tool_choice.type must be auto, any, tool or none.", "tool_choice.type")
        if given.tool_choice.get("disable_parallel_tool_use") is True:
            chat["parallel_tool_calls"] = False
    return chat


def _tool(tool: object, path: str) -> Json:
    tool = object_at(tool, path)
    if tool.get("type") not in (None, "custom"):
        raise invalid_request(f"{path}.type must be \"custom\": this server runs no tools itself.", f"{path}.type")
    function: Json = {"name": text_of(tool, "name", path),
                      "parameters": object_at(tool.get("input_schema"), f"{path}.input_schema")}
    if tool.get("description") is not None:
        function["description"] = text_of(tool, "description", path)
    return {"type": "function", "function": function}


def _form(given: MessagesBody) -> Json:
    wanted, path = given.output_format, "output_format"
    if wanted is None and given.output_config is not None:
        wanted, path = given.output_config.get("format"), "output_config.format"
    if wanted is None:
        return {}
    if object_at(wanted, path).get("type") != "json_schema":
        raise invalid_request(f"{path}.type must be \"json_schema\".", f"{path}.type")
    schema = object_at(wanted.get("schema"), f"{path}.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _thinking(thinking: Mapping[str, Any], kwargs: Mapping[str, Any] | None) -> Json:
    """Templates that know thinking call its switch so; others never look."""
    kind = text_of(thinking, "type", "thinking")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid_request("thinking.type must be enabled, disabled or adaptive.", "thinking.type")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled", **(kwargs or {})}}


_PARAMS = {"stop": "stop_sequences", "response_format": "output_config", "user": "metadata.user_id",
           "parallel_tool_calls": "tool_choice", "stream_options": "stream"}
MESSAGES = ForeignApi("/v1/messages", messages_to_chat, _PARAMS, messages_error)
COUNT_TOKENS = ForeignApi("/v1/messages/count_tokens", count_to_chat, _PARAMS, messages_error)
