"""Which message forms a chat template reads, found by asking it.

OpenAI's messages come in forms that many templates never saw: content as a list of parts, content null beside tool
calls, tool arguments as JSON text. No metadata says what a template supports, and reading its source misleads
(content may be looped over in one role and concatenated in another). So tiny conversations are rendered, once per
question and template, and the answer is kept. Must never change a message that the template reads as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from worker.protocol.api_error import invalid_request

PART_JOINER = "\n"
"""Between the text parts of one message where a template takes strings only; vLLM joins the same way."""

Message = dict[str, Any]

_FIRST, _SECOND = "headstart-probe-one", "headstart-probe-two"
_CALL_NAME, _CALL_ARGUMENTS = "headstart_probe", {"city": "headstart-probe-three"}


class ContentForm(Enum):
    """How a role's content must be written: as a string, as a list of parts, or as either."""

    STRING = "string"
    PARTS = "parts"
    EITHER = "either"


class CallForm(NamedTuple):
    """How an assistant message with tool calls must be written.

    `absent_content`: the keys that stand for "no content": none at all (transformers' way), null, or "".
    """

    arguments_as_text: bool
    absent_content: Mapping[str, str | None]


_ABSENT_CONTENT: tuple[Mapping[str, str | None], ...] = ({}, {"content": None}, {"content": ""})
_CALL_FORMS = tuple(CallForm(as_text, absent) for absent in _ABSENT_CONTENT for as_text in (True, False))


class TemplateDialect:
    """One template's answers, asked for on first need. `probe` renders messages or returns None when refused.

    Two threads may ask the same question at once; they get, and store, the same answer.
    """

    def __init__(self, source: str, probe: Callable[[Sequence[Message]], str | None]) -> None:
        self._probe = probe
        self._knows_developer = "developer" in source
        self._content_forms: dict[str, ContentForm] = {}
        self._call_form: CallForm | None = None

    def adapt(self, message: Message, index: int) -> Message:
        """The message in a form that the template reads; `index` is its place, for errors."""
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            # OpenAI's newer name of the system role; templates that predate it skip such messages silently.
            role = "system"
            message = {**message, "role": role}
        if "content" in message:
            message = self._adapt_content(message, self.content_form(role))
        if message.get("tool_calls"):
            message = _adapt_calls(message, self.call_form(), f"messages[{index}]")
        return message

    def content_form(self, role: str) -> ContentForm:
        """Whether this role's content may be a list: both texts of a two-part list must come out, and no type tag."""
        form = self._content_forms.get(role)
        if form is None:
            form = self._content_forms[role] = self._ask_content_form(role)
        return form

    def call_form(self) -> CallForm:
        """The first form in which a probe's call name and arguments come out unescaped."""
        if self._call_form is None:
            self._call_form = next((form for form in _CALL_FORMS if self._reads_calls(form)), _CALL_FORMS[0])
        return self._call_form

    def _ask_content_form(self, role: str) -> ContentForm:
        parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        listed = self._probe(_conversation(role, parts, self))
        reads_parts = (listed is not None and _FIRST in listed and _SECOND in listed
                       and "'type'" not in listed and '"type"' not in listed)
        if not reads_parts:
            return ContentForm.STRING
        plain = self._probe(_conversation(role, _FIRST, self))
        return ContentForm.EITHER if plain is not None and _FIRST in plain else ContentForm.PARTS

    def _reads_calls(self, form: CallForm) -> bool:
        text = self._probe(_called(form))
        if text is None or _CALL_NAME not in text:
            return False
        if form.arguments_as_text:
            return json.dumps(_CALL_ARGUMENTS) in text
        return _CALL_ARGUMENTS["city"] in text

    def _adapt_content(self, message: Message, form: ContentForm) -> Message:
        content = message["content"]
        if form is ContentForm.STRING and isinstance(content, list):
            return {**message, "content": PART_JOINER.join(part["text"] for part in content)}
        if form is ContentForm.PARTS and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def _conversation(role: str, content: object, dialect: TemplateDialect) -> list[Message]:
    """The shortest conversation in which a message of this role is in place."""
    asked = {"role": "user", "content": "?"}
    message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "assistant":
        return [asked, message]
    if role == "tool":
        return [*_called(dialect.call_form()), {**message, "tool_call_id": "probe0001", "name": _CALL_NAME}]
    return [message, asked]


def _called(form: CallForm) -> list[Message]:
    arguments = json.dumps(_CALL_ARGUMENTS) if form.arguments_as_text else _CALL_ARGUMENTS
    call = {"id": "probe0001", "type": "function", "function": {"name": _CALL_NAME, "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", **form.absent_content, "tool_calls": [call]}]


def _adapt_calls(message: Message, form: CallForm, path: str) -> Message:
    calls = [_adapt_call(call, form, f"{path}.tool_calls[{index}].function.arguments")
             for index, call in enumerate(message["tool_calls"])]
    return {**form.absent_content, **message, "tool_calls": calls}


def _adapt_call(call: Mapping[str, Any], form: CallForm, path: str) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str) is form.arguments_as_text:
        return call
    if form.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise invalid_request(f"{path} must be the text of a JSON object.", path) from None
    return {**call, "function": {**function, "arguments": arguments}}
