"""The form an answer must have or may have: its grammar, and the parser for its tool calls.

Owns which of a request's fields lead to which. A grammar is needed where the form is demanded (`response_format`,
`tool_choice` required or named); a parser wherever the model may call tools.
"""

from __future__ import annotations

from worker.prompt.grammar_spec import GrammarKind, GrammarSpec, grammar_spec
from worker.prompt.output_shape import FORCED
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest, CompletionRequest
from worker.prompt.tool_grammar import tool_call_grammar
from worker.prompt.tool_parser import MAX_CALLS, ToolCallParser


def grammar_of(body: ChatRequest | CompletionRequest, renderer: PromptRenderer) -> GrammarSpec | None:
    """None where any text will do. ApiError 400 when it is too large."""
    if isinstance(body, ChatRequest) and body.may_call_tools:
        forced = body.tool_choice in FORCED
        if not forced and body.response_schema is None:
            return None
        tools = [tool for tool in body.tools or () if body.forced_tool in (None, tool["function"]["name"])]
        text = tool_call_grammar(
            renderer.tool_style, tools, marker_id=_marker_id(renderer), parallel=body.parallel_tool_calls,
            answer_schema=None if forced else body.response_schema)
        return grammar_spec(GrammarKind.LARK, text, "tools" if forced else "response_format")
    if body.response_schema is None:
        return None
    return grammar_spec(GrammarKind.JSON_SCHEMA, body.response_schema, "response_format")


def tool_parser_of(body: ChatRequest | CompletionRequest, renderer: PromptRenderer) -> ToolCallParser | None:
    """A parser for one choice; None where no tools were offered."""
    if not isinstance(body, ChatRequest) or not body.may_call_tools:
        return None
    names = [tool["function"]["name"] for tool in body.tools or ()]
    return ToolCallParser(renderer.tool_style, names, max_calls=MAX_CALLS if body.parallel_tool_calls else 1)


def needs_special_tokens(body: ChatRequest | CompletionRequest, renderer: PromptRenderer) -> bool:
    """Whether the parser would miss its marker in a text without special tokens."""
    return isinstance(body, ChatRequest) and body.may_call_tools and _marker_id(renderer) is not None


def _marker_id(renderer: PromptRenderer) -> int | None:
    return renderer.tokenizer.special_token_id(renderer.tool_style.marker)
