"""The grammar of an answer that must be tool calls, or may be: Lark text for the engine's grammar compiler.

Owns the written form of each call for a grammar; tool_style.py has it for the parser. Each tool's parameters are a
schema of their own, so that their `$ref`s point where they did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from worker.prompt.tool_style import ToolStyle

WHITESPACE_CHARS_MAX = 32
"""Between two tokens of JSON. Bounded: a model that runs into white space would otherwise never come out."""
WHITESPACE_PATTERN = rf"[\x20\x0A\x0D\x09]{{0,{WHITESPACE_CHARS_MAX}}}"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_call_grammar(style: ToolStyle, tools: Sequence[Mapping[str, Any]], *, marker_id: int | None,
                      parallel: bool, answer_schema: str | None = None) -> str:
    """Lark for one call of any of `tools`, or several where `parallel`; or else for an answer of `answer_schema`.

    `marker_id`: the style's marker where it is a special token, which no text can spell.
    """
    marker = _text(style.marker) if marker_id is None else f"<[{marker_id}]>"
    calls = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}[style.name](marker, parallel)
    lines = [f"start: {'calls' if answer_schema is None else 'calls | answer'}", f"calls: {calls}",
             "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        function = tool["function"]
        prefix = f'{{"name": {_json(function["name"])}, "{style.arguments_key}": '
        lines.append(f"call_{index}: {_text(prefix)} arguments_{index} {_text('}')}")
        lines.append(f"arguments_{index}: %json {_json(_bounded(function.get('parameters') or _NO_PARAMETERS))}")
    if answer_schema is not None:
        lines.append(f"answer: %json {_json(_bounded(msgspec.json.decode(answer_schema)))}")
    return "\n".join(lines) + "\n"


def _hermes(marker: str, parallel: bool) -> str:
    one = f'{marker} "\\n" call "\\n</tool_call>"'
    return f'{one} ("\\n" {one})*' if parallel else one


def _llama3(marker: str, parallel: bool) -> str:
    return 'call ("; " call)*' if parallel else "call"


def _mistral(marker: str, parallel: bool) -> str:
    return f'{marker} "[" call (", " call)* "]"' if parallel else f'{marker} "[" call "]"'


def _bounded(schema: object) -> object:
    """The schema with our white space, whatever it said about that itself."""
    if not isinstance(schema, dict):
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE_PATTERN}}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _text(text: str) -> str:
    return _json(text)
