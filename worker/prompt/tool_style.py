"""How a family of models writes its tool calls, and which way a chat template teaches.

Owns the three written forms. A style is data: the parser and the grammar are written once for all of them.

Hermes and Qwen:  <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>
Llama 3:          {"name": "f", "parameters": {...}}; {"name": ...}      from the answer's first character on
Mistral:          [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]

A template that shows none of them is taken for Hermes, the most widespread. Known approximation: Mistral's newer
`[TOOL_CALLS]name[ARGS]{...}` is not read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """`marker` opens a call; `bare` styles also begin one with the answer's first brace.

    `lead` is written between marker and first object, `separators` between objects, `closer` at the end.
    `arguments_key` is what the model writes; both keys are read. `call_id_chars` is the length of ids that its
    templates accept.
    """

    name: str
    marker: str
    lead: str
    separators: str
    closer: str
    arguments_key: str
    bare: bool = False
    call_id_chars: int = 24
    call_id_prefix: str = "call_"


HERMES = ToolStyle("hermes", "<tool_call>", "", "", "</tool_call>", "arguments")
LLAMA3 = ToolStyle("llama3", "<|python_tag|>", "", ";,", "", "parameters", bare=True)
MISTRAL = ToolStyle("mistral", "[TOOL_CALLS]", "[", ",", "]", "arguments", call_id_chars=9, call_id_prefix="")


def style_of_template(source: str) -> ToolStyle:
    """The style that a chat template asks its model for."""
    for style in (HERMES, MISTRAL):
        if style.marker in source:
            return style
    if LLAMA3.marker in source or "ipython" in source or '"parameters":' in source:
        return LLAMA3
    return HERMES
