"""Stories of one template: what it needs is found out, what it refuses is a 400; golden tests compare renderings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.prompt import chat_template
from worker.prompt.chat_template import ChatTemplate
from worker.prompt.template_dialect import ContentForm
from worker.protocol.api_error import ApiError

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
STRINGS = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
EITHER = ("{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
          "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}")
CALLS_AS_OBJECTS = ("{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
                    "({{ c.function.arguments | tojson }}){% endfor %}"
                    "{% else %}{{ m.content }}{% endif %}{% endfor %}")
CALLS_BY_ITEM = ("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
                 "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}")
TWO_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(("source", "expected"), [
    (PLAIN, "<user>one\ntwo</>"), (STRINGS, "<user>one\ntwo"),
    (PARTS, "<user>[one][two]"), (EITHER, "<user>[one][two]"),
])
def test_parts_arrive_in_the_form_the_template_reads(source: str, expected: str) -> None:
    assert render(source, {"role": "user", "content": TWO_PARTS}) == expected


@pytest.mark.parametrize(("source", "expected"), [
    (PLAIN, "<user>hi</>"), (STRINGS, "<user>hi"), (PARTS, "<user>[hi]"), (EITHER, "<user>hi"),
])
def test_strings_arrive_in_the_form_the_template_reads(source: str, expected: str) -> None:
    assert render(source, {"role": "user", "content": "hi"}) == expected


def test_each_role_has_its_own_form() -> None:
    source = ("{% if messages[0].role == 'system' %}{{ messages[0].content + '|' }}{% set messages = messages[1:] %}"
              "{% endif %}" + EITHER)
    template = ChatTemplate(source, {})
    assert template.render([{"role": "system", "content": TWO_PARTS}, {"role": "user", "content": TWO_PARTS}]) == (
        "one\ntwo|<user>[one][two]")


def test_parts_are_joined_where_only_the_first_would_be_read() -> None:
    first_only = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    assert render(first_only, {"role": "system", "content": TWO_PARTS}) == "one\ntwo"


def test_null_fields_are_absent() -> None:
    source = "{{ messages[0].name is defined }}{{ messages[0].content }}"
    assert render(source, {"role": "user", "content": "x", "name": None}) == "Falsex"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_offered_under_every_name(name: str) -> None:
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    assert render(source, {"role": "assistant", "content": "x", name: "hmm"}) == "hmm|hmm"


def test_a_template_that_refuses_every_probe_gets_messages_untouched() -> None:
    source = "{% if messages | length < 4 %}{{ raise_exception('too few') }}{% endif %}" + PLAIN
    assert render(source, *[{"role": "user", "content": "x"}] * 4) == "<user>x</>" * 4


@pytest.mark.parametrize("arguments", ['{"city": "Åre"}', {"city": "Åre"}])
def test_tool_arguments_become_objects_where_the_template_dumps_them(arguments: Any) -> None:
    assert render(CALLS_AS_OBJECTS, {"role": "user", "content": "?"}, call(arguments)) == '?f({"city": "Åre"})'
    assert render(CALLS_BY_ITEM, {"role": "user", "content": "?"}, call(arguments)) == "f city=Åre"


def test_empty_arguments_are_an_empty_object() -> None:
    assert render(CALLS_AS_OBJECTS, call("")) == "f({})"


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', "{", "[" * 5_000])
def test_arguments_that_cannot_become_an_object(arguments: str) -> None:
    with pytest.raises(ApiError, match="JSON object") as raised:
        render(CALLS_AS_OBJECTS, {"role": "user", "content": "?"}, call(arguments))
    assert raised.value.param == "messages[1].tool_calls[0].function.arguments"


def test_the_messages_of_the_request_are_not_changed() -> None:
    messages = [{"role": "developer", "content": TWO_PARTS, "name": None}, call('{"a": 1}')]
    before = json.dumps(messages)
    ChatTemplate(CALLS_AS_OBJECTS, {}).render(messages)
    ChatTemplate(PLAIN, {}).render([{"role": "user", "content": TWO_PARTS}], continue_final_message=True)
    assert json.dumps(messages) == before


def test_developer_stays_where_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert render(PLAIN, message) == "<system>x</>"
    assert render("{# developer #}" + PLAIN, message) == "<developer>x</>"


@pytest.mark.parametrize(("source", "expected"), [
    (PLAIN, False), ("{% if tools %}x{% endif %}", True), ("{{ tools | tojson }}", True),
    ("{% if custom %}{% set tools = custom %}{% endif %}{% if tools %}x{% endif %}", True),
    ("{% set tools = 1 %}{{ tools }}", False), ("{# tools #}{{ 'tools' }}", False),
    ("{% macro list() %}{{ tools }}{% endmacro %}", True),
])
def test_uses_tools(source: str, expected: bool) -> None:
    assert ChatTemplate(source, {}).uses_tools is expected


def test_turn_end() -> None:
    assert ChatTemplate(PLAIN, {}).turn_end_text() == "</>"
    assert ChatTemplate("{{ raise_exception('never') }}", {}).turn_end_text() == ""
    assert ChatTemplate("nothing", {}).turn_end_text() == ""


def test_not_a_template() -> None:
    with pytest.raises(ValueError, match=r"not valid Jinja.*line 2"):
        ChatTemplate("\n{% if %}", {})


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1_000)
    assert len(render("{{ messages[0].content }}", {"role": "user", "content": "x" * 1_000})) == 1_000
    with pytest.raises(ApiError, match="longer than 1000") as raised:
        render("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", {"role": "user", "content": "xx"})
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_errors_never_repeat_the_prompt_at_length() -> None:
    with pytest.raises(ApiError) as raised:
        render("{{ raise_exception(messages[0].content) }}", {"role": "user", "content": "secret " * 10_000})
    assert len(raised.value.message) < 1_000


def test_forms_are_asked_for_once() -> None:
    template = ChatTemplate(EITHER, {})
    assert template._dialect.content_form("user") is ContentForm.EITHER
    assert template._dialect._content_forms == {"user": ContentForm.EITHER}
