"""Chat messages to text, exactly as transformers' apply_chat_template renders them.

Owns one compiled template and its context. Where an OpenAI message has a form that this template cannot read (text
parts, absent content, JSON arguments), template_dialect.py rewrites it first; every other message passes untouched.
Must never tokenise. What a template raises is the client's 400, with the template's own words: it is the template
that says "roles must alternate".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

import jinja2
from jinja2 import meta

from worker.prompt.template_dialect import TemplateDialect
from worker.prompt.template_sandbox import chat_template_environment
from worker.protocol.api_error import ApiError, invalid_request

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""Twice the default body limit: a template that writes more than that multiplies its input."""
MAX_ERROR_CHARS = 500
PIECES_AT_ONCE = 64  # written between two looks at the length

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_REASONING_NAMES = frozenset(_REASONING_FIELDS)
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Written after the final message to find its end; the trailing space tells whether the template trims."""

Message = dict[str, Any]


class ChatTemplate:
    """One compiled Jinja template with the special tokens it may name. Safe to use from several threads.

    `uses_tools`: the template reads `tools`; without that, tools in a request would be dropped silently.
    Raises ValueError when `source` is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *,
                 now: Callable[[], datetime] = datetime.now) -> None:
        environment = chat_template_environment(now)
        try:
            self._template = environment.from_string(source)
            self.uses_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error} (line {error.lineno})") from error
        self._globals = dict(self._template.globals)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._dialect = TemplateDialect(source, self._render_or_none)
        self._plain_roles: set[str] = set()     # whose messages of a role and a text pass untouched

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               template_kwargs: Mapping[str, Any] | None = None) -> str:
        """The prompt text. ApiError 400, param `messages`, when the template refuses or the result is too long.

        `template_kwargs` are further names for the template (enable_thinking, documents); they win over special
        tokens of the same name, as in transformers.
        """
        chat = [message if type(message) is dict and len(message) == 2 and type(message.get("content")) is str
                and message.get("role") in self._plain_roles else self._adapted(message, index)
                for index, message in enumerate(messages)]
        final = self._mark_final_message(chat) if continue_final_message else None
        context = {"documents": None, **self._special_tokens, **(template_kwargs or {}),
                   "messages": chat, "tools": list(tools) if tools is not None else None,
                   "add_generation_prompt": add_generation_prompt}
        try:
            text = _join(self._generate(context))
        except (ApiError, MemoryError):
            raise
        except Exception as error:  # foreign code: whatever it raises is its answer to these messages
            words = str(error)[:MAX_ERROR_CHARS] or type(error).__name__
            raise invalid_request(f"The chat template cannot render these messages: {words}", "messages") from error
        return text if final is None else _cut_at_mark(text, final)

    def _adapted(self, message: Mapping[str, Any], index: int) -> Message:
        """The message in a form that the template reads. Of one that is a role and a text, the role alone decides."""
        adapted = _with_reasoning_aliases(self._dialect.adapt(_without_nulls(message), index))
        if adapted is message and len(message) == 2 and type(message.get("content")) is str:
            self._plain_roles.add(message["role"])
        return adapted

    def turn_end_text(self) -> str:
        """What the template writes after an assistant's content: "<|im_end|>\\n", or "" when that cannot be told."""
        mark = "headstart-turn"
        text = self._render_or_none([{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}])
        return text.rpartition(mark)[2] if text and mark in text else ""

    def _render_or_none(self, messages: Sequence[Message]) -> str | None:
        """A probe: the text, or None when the template refuses. Bypasses the dialect, which is built on it."""
        context = {"documents": None, **self._special_tokens, "messages": list(messages), "tools": None,
                   "add_generation_prompt": False}
        try:
            return _join(self._generate(context))
        except Exception:  # a refusal is an answer here
            return None

    def _generate(self, context: Mapping[str, Any]) -> Iterable[str]:
        """The template's output piece by piece: Template.generate() without its merging of globals at every call."""
        template = self._template
        environment = template.environment
        return template.root_render_func(environment.context_class(
            environment, {**self._globals, **context}, template.name, template.blocks))

    def _mark_final_message(self, chat: list[Message]) -> str:
        """Append the mark to the last message's text and return that text."""
        content = chat[-1].get("content")
        path = f"messages[{len(chat) - 1}].content"
        if content is None or "content" not in self.source:
            raise invalid_request("continue_final_message needs a final message with content.", path)
        if isinstance(content, str):
            chat[-1] = {**chat[-1], "content": content + _CONTINUE_MARK}
            return content
        parts = [dict(part) for part in content]
        last_text = next((part for part in reversed(parts) if "text" in part), None)
        if last_text is None:
            raise invalid_request("continue_final_message needs a text part to continue.", path)
        text = str(last_text["text"])
        last_text["text"] = text + _CONTINUE_MARK
        chat[-1] = {**chat[-1], "content": parts}
        return text


def _without_nulls(message: Mapping[str, Any]) -> Message:
    # OpenAI's null means absent, and templates print "None" for it or fail; transformers drops such keys too.
    if None in message.values():
        return {key: value for key, value in message.items() if value is not None}
    return message if type(message) is dict else dict(message)


def _with_reasoning_aliases(message: Message) -> Message:
    """Templates read a message's reasoning under different names; offer the ones that transformers offers."""
    if _REASONING_NAMES.isdisjoint(message):
        return message
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_MARK.strip()
    if final.strip() not in text or mark not in text:
        raise invalid_request("continue_final_message: the chat template leaves out part of the final message, so "
                              "there is nothing to continue.", "continue_final_message")
    end = text.rindex(mark)
    if text[end:end + len(_CONTINUE_MARK)] == _CONTINUE_MARK:
        return text[:end]
    return text[:end].rstrip()  # the template trims contents


def _join(pieces: Iterable[str]) -> str:
    size, kept, coming = 0, list[str](), iter(pieces)
    while some := list(islice(coming, PIECES_AT_ONCE)):
        size += sum(map(len, some))
        if size > MAX_RENDERED_CHARS:
            raise invalid_request(f"The rendered prompt is longer than {MAX_RENDERED_CHARS} characters.", "messages")
        kept += some
    return "".join(kept)
