"""OpenAI's POST /v1/responses bodies as chat bodies, statelessly.

Owns the meaning of their fields. Every complaint is a 400 that names the field as the client wrote it. What would
need a memory between requests is refused (`previous_response_id`, `conversation`, `background`, item references), and
so are tools that a server would run. Accepted and without effect: `store` (nothing is stored, as the answer says),
`metadata`, `reasoning`, `service_tier`, `max_tool_calls`, `text.verbosity`, and reasoning items of earlier turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

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
from worker.prompt.request_schema import MAX_LOGPROBS, TokenCount
from worker.prompt.responses_answer import ResponsesAnswer
from worker.protocol.api_error import ApiError, invalid_request

_ROLES = ("user", "assistant", "system", "developer")
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt", "context_management")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesBody(ForeignBody, kw_only=True):
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    truncation: str | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    context_management: Any = None


_decoder = msgspec.json.Decoder(ResponsesBody)


def responses_to_chat(body: bytes) -> Translated:
    """ApiError 400 that names the field."""
    given = decode_body(body, _decoder).value
    _refuse_unsupported(given)
    has_logprobs = _LOGPROBS in (given.include or ())
    chat: Json = {"model": given.model, "stream": bool(given.stream), "messages": _messages(given),
                  **given_extras(given), **_tools(given), **_form(given)}
    for name in ("temperature", "top_p", "top_k", "user"):
        if (value := getattr(given, name)) is not None:
            chat[name] = value
    if given.max_output_tokens is not None:
        chat["max_tokens"] = given.max_output_tokens
    if given.stream:
        chat["stream_options"] = {"include_usage": True}
    if has_logprobs:
        chat |= {"logprobs": True, "top_logprobs": given.top_logprobs or 0}
    return Translated(chat, ResponsesAnswer(_echoed(given), has_logprobs=has_logprobs))


def _refuse_unsupported(given: ResponsesBody) -> None:
    for name in _STATEFUL:
        if getattr(given, name) not in (None, False):
            raise invalid_request(f"{name} is not supported: this server keeps nothing between requests. Send the "
                                  "whole conversation as input.", name)
    if given.truncation not in (None, "disabled"):
        raise invalid_request("truncation must be \"disabled\": nothing is dropped from an input here.", "truncation")
    for index, wanted in enumerate(given.include or ()):
        if wanted not in _INCLUDABLE:
            raise invalid_request(f"include[{index}] is {wanted[:64]!r}; {' and '.join(_INCLUDABLE)} are known.",
                                  f"include[{index}]")
    if given.top_logprobs and _LOGPROBS not in (given.include or ()):
        raise invalid_request(f"top_logprobs is only allowed when include holds {_LOGPROBS!r}.", "top_logprobs")


def _echoed(given: ResponsesBody) -> Json:
    """What a response repeats of its request."""
    form = (given.text or {}).get("format") or {"type": "text"}
    return {
        "model": given.model, "instructions": given.instructions, "max_output_tokens": given.max_output_tokens,
        "max_tool_calls": given.max_tool_calls, "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "store": False,
        "temperature": 1.0 if given.temperature is None else given.temperature, "text": {"format": form},
        "tool_choice": "auto" if given.tool_choice is None else given.tool_choice,
        "tools": [{"strict": None, **tool} for tool in given.tools or []], "top_logprobs": given.top_logprobs or 0,
        "top_p": 1.0 if given.top_p is None else given.top_p, "truncation": "disabled", "user": given.user,
        "background": False, "prompt_cache_key": given.prompt_cache_key, "safety_identifier": given.safety_identifier}


def _messages(given: ResponsesBody) -> list[Json]:
    messages: list[Json] = []
    if given.instructions:
        messages.append({"role": "system", "content": given.instructions})
    if isinstance(given.input, str):
        return [*messages, {"role": "user", "content": given.input}]
    if not given.input:
        raise invalid_request("input must hold at least one item.", "input")
    for index, item in enumerate(list_at(given.input, "input")):
        path = f"input[{index}]"
        _add_item(messages, object_at(item, path), path)
    if not messages:
        raise invalid_request("input says nothing.", "input")
    return messages


def _add_item(messages: list[Json], item: Mapping[str, Any], path: str) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append(_message(item, path))
        case "function_call":
            call = {"id": text_of(item, "call_id", path), "type": "function", "function": {
                "name": text_of(item, "name", path), "arguments": text_of(item, "arguments", path)}}
            # What one turn of the model said and called is one message in a chat.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _parts(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": text_of(item, "call_id", path), "content": content})
        case "reasoning":
            return
        case "item_reference":
            raise invalid_request(f"{path} refers to a stored item, and nothing is stored here: send the item.", path)
        case other:
            raise invalid_request(f"{path} is of type {str(other)[:64]!r}, which is not supported.", f"{path}.type")


def _message(item: Mapping[str, Any], path: str) -> Json:
    role = text_of(item, "role", path)
    if role not in _ROLES:
        raise invalid_request(f"{path}.role must be one of {', '.join(_ROLES)}.", f"{path}.role")
    content = item.get("content")
    return {"role": role, "content": content if isinstance(content, str) else _parts(content, f"{path}.content")}


def _parts(parts: object, path: str) -> str | list[Json]:
    texts = []
    for index, part in enumerate(list_at(parts, path)):
        here = f"{path}[{index}]"
        kind = text_of(object_at(part, here), "type", here)
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise invalid_request(f"{here} is of type {kind[:64]!r}, but this model reads text only.", here)
        texts.append(text_of(part, "refusal" if kind == "refusal" else "text", here))
    if not texts:
        raise invalid_request(f"{path} must hold at least one part.", path)
    return content_of(texts)


def _tools(given: ResponsesBody) -> Json:
    chat: Json = {}
    if given.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(list_at(given.tools, "tools"))]
    if given.parallel_tool_calls is not None:
        chat["parallel_tool_calls"] = given.parallel_tool_calls
    if given.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(given.tool_choice)
    return chat


def _tool_choice(choice: str | Mapping[str, Any]) -> str | Json:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise invalid_request("tool_choice must be 'auto', 'none', 'required' or "
                              '{"type": "function", "name": ...}.', "tool_choice")
    return {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}


def _tool(tool: object, path: str) -> Json:
    tool = object_at(tool, path)
    if tool.get("type") != "function":
        raise invalid_request(f"{path}.type must be \"function\": this server runs no tools of its own.",
                              f"{path}.type")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict")
                if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _form(given: ResponsesBody) -> Json:
    wanted = (given.text or {}).get("format")
    if wanted is None:
        return {}
    kind = text_of(object_at(wanted, "text.format"), "type", "text.format")
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    schema = object_at(wanted.get("schema"), "text.format.schema")
    return {"response_format": {"type": kind, "json_schema": {"name": wanted.get("name") or "answer",
                                                              "schema": schema}}}


def _openai_error(error: ApiError) -> Json:
    return {**ApiError.body(error)}


RESPONSES = ForeignApi("/v1/responses", responses_to_chat, {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format", "logprobs": "include",
    "stream_options": "stream", "functions": "tools"}, _openai_error)
