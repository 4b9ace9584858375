"""However a text is cut, it has the same text and the same calls; and nothing that is no call is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.prompt.tool_parser import ToolCall, ToolCallParser
from worker.prompt.tool_style import HERMES, LLAMA3, MISTRAL, ToolStyle, style_of_template

STYLES = [HERMES, LLAMA3, MISTRAL]
NAMES = ["f", "get weather"]
PIECES = ["<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "[", "]", ",", ";", "{",
          "}", '"', "\\", "\n", " ", "x", "ü", '{"name": "f", "arguments": {}}',
          '{"name":"f","parameters":{"a":"]}</tool_call>"}}',
          '{"arguments": {"b": [1, {"c": "\\""}]}, "name": "get weather"}', '{"name": "unknown", "arguments": {}}',
          '{"name": "f", "arguments": 5}', '{"name": "f", "arguments": "{\\"a\\": 1}"}']
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def parse(style: ToolStyle, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(style, NAMES)
    text, calls = "", []
    for piece in pieces:
        parsed = parser.push(piece)
        text += parsed.text
        calls += parsed.calls
    return text + parser.finish(), calls


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@given(text=texts, places=st.lists(st.integers(0, 500), max_size=20))
def test_any_split_gives_the_same(style: ToolStyle, text: str, places: list[int]) -> None:
    whole = parse(style, [text])
    assert parse(style, cut(text, places)) == whole
    assert parse(style, list(text)) == whole


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@given(text=texts)
def test_calls_are_whole_and_text_without_calls_is_untouched(style: ToolStyle, text: str) -> None:
    said, calls = parse(style, [text])
    for index, call in enumerate(calls):
        assert call.index == index
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)
    if not calls:
        assert said == text


@pytest.mark.parametrize(("style", "text", "said", "calls"), [
    (HERMES, 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', "Hm.", ['{"a": 1}']),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"f"}</tool_call>', "",
     ["{}", "{}"]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}', "", ['{"a": "</tool_call>"}']),
    (HERMES, '<tool_call>\n{"name": "f", "argum', '<tool_call>\n{"name": "f", "argum', []),
    (HERMES, '<tool_call>{"name":"g","arguments":{}}</tool_call> x',
     '<tool_call>{"name":"g","arguments":{}}</tool_call> x', []),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}\n</too', "", ["{}"]),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_', "", ["{}"]),
    (HERMES, 'Hm. <tool_', "Hm. <tool_", []),
    (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    (LLAMA3, ' {"name": "f", "parameters": {"x": "y"}}; {"name": "f", "parameters": {}}', "", ['{"x": "y"}', "{}"]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", ["{}"]),
    (LLAMA3, 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
    (LLAMA3, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"k": [1]}}]', "",
     ["{}", '{"k": [1]}']),
    (MISTRAL, 'so: [TOOL_CALLS][{"name": "f", "arguments": {}}]', "so:", ["{}"]),
])
def test_what_models_write(style: ToolStyle, text: str, said: str, calls: list[str]) -> None:
    found_text, found = parse(style, [text])
    assert (found_text, [call.arguments for call in found]) == (said, calls)


def test_one_call_only_where_one_is_allowed() -> None:
    parser = ToolCallParser(HERMES, ["f"], max_calls=1)
    parsed = parser.push('<tool_call>{"name":"f"}</tool_call><tool_call>{"name":"f"}</tool_call>')
    assert len(parsed.calls) == 1
    assert parsed.text + parser.finish() == ""


@pytest.mark.parametrize(("source", "style"), [
    ("... <tool_call>\\n ...", HERMES), ("[AVAILABLE_TOOLS] ... [TOOL_CALLS] ...", MISTRAL),
    ("{{ '<|python_tag|>' }}", LLAMA3), ("Environment: ipython", LLAMA3), ("no tools at all", HERMES)])
def test_the_style_is_read_off_the_template(source: str, style: ToolStyle) -> None:
    assert style_of_template(source) is style
