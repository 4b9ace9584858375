"""What a request says about the form of its answer: `response_format` and `tool_choice`, checked.

Owns their meaning. Whether a schema can be followed is found out by the engine's grammar compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from worker.prompt.grammar_spec import ANY_OBJECT, check_schema
from worker.prompt.request_schema import ResponseFormat
from worker.protocol.api_error import invalid_request


class ToolChoice(StrEnum):
    """"named": the one tool that the request names."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


FORCED = (ToolChoice.REQUIRED, ToolChoice.NAMED)


def response_schema(wanted: ResponseFormat | None) -> str | None:
    """The JSON schema of the answer as text; None where any text will do. ApiError 400 for an unknown type."""
    match None if wanted is None else wanted.type:
        case None | "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            assert wanted is not None
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                raise invalid_request("response_format of type 'json_schema' needs json_schema.schema, an object.",
                                      "response_format")
            check_schema(wanted.json_schema.schema, "response_format")
            return msgspec.json.encode(wanted.json_schema.schema).decode()
        case other:
            raise invalid_request(f"response_format of type {str(other)[:64]!r} is not supported; 'text', "
                                  "'json_object' and 'json_schema' are.", "response_format")


def tool_choice(choice: str | Mapping[str, Any] | None,
                tools: Sequence[Mapping[str, Any]] | None) -> tuple[ToolChoice, str | None]:
    """The choice, and the name of the tool that it forces. ApiError 400 `tool_choice` when it makes no sense."""
    if choice is None:
        return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
    if choice == ToolChoice.NONE:
        return ToolChoice.NONE, None
    name = None if isinstance(choice, str) else _named_tool(choice)
    if name is None and choice not in (ToolChoice.AUTO, ToolChoice.REQUIRED):
        raise invalid_request("tool_choice must be 'auto', 'none', 'required' or "
                              '{"type": "function", "function": {"name": ...}}.', "tool_choice")
    if not tools:
        raise invalid_request("tool_choice is only allowed when tools are given.", "tool_choice")
    if name is None:
        return ToolChoice(str(choice)), None
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid_request(f"tool_choice names {name[:64]!r}, which is none of the tools.", "tool_choice")
    return ToolChoice.NAMED, name


def check_tool_schemas(tools: Sequence[Mapping[str, Any]]) -> None:
    """ApiError 400 `tools` for parameters that no grammar can be made of: for an answer that must follow one."""
    for tool in tools:
        check_schema(tool["function"].get("parameters"), "tools")


def _named_tool(choice: Mapping[str, Any]) -> str | None:
    function = choice.get("function")
    name = function.get("name") if choice.get("type") == "function" and isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
