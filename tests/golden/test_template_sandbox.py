"""Small templates, one for each feature of the sandbox: rendered as transformers does, or refused by both."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from worker.prompt.chat_template import ChatTemplate
from worker.protocol.api_error import ApiError

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a <b> & 'c' \"d\" é 🌦"},
    {"role": "assistant", "content": "ok", "z": 1, "a": [None, 1.5]},
]
RENDERED = {
    "trim and lstrip": "{% for m in messages %}\n   {% if m.role %}\n  {{ m.role }}\n   {% endif %}\n{% endfor %}\n",
    "whitespace control": "  {%- for m in messages -%}  {{- m.role -}}  {%- endfor %}  end",
    "tojson": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ tools | tojson }}",
    "tojson options": "{{ messages[1] | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
                      "{{ 'é' | tojson(true) }}",
    "break and continue": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}"
                          "{% endif %}{{ i }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}\n"
                  "{% endgeneration %}{{ x }}{% endfor %}",
    "generation with control": "{%- generation -%}  body {{ x }}  {%- endgeneration -%}",
    "namespace": "{% set ns = namespace(n=0, self=3) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
                 "{{ ns.n }}{{ ns.self }}",
    "namespace of a dict": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}",
    "dict": "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['k'], 0) }}{{ dict(messages[1]).z }}",
    "string methods": "{{ messages[0].content.split('<')[0] | trim }}{{ 'a' ~ 1 }}{{ '%s' | format('x') }}"
                      "{{ '{}'.format(3) }}",
    "undefined": "[{{ nothing }}{{ messages[0].nothing }}]{% if nothing is defined %}!{% endif %}",
    "extra names": "{{ bos_token }}{{ enable_thinking }}{{ documents }}",
    "slices": "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role }}{% endfor %}{{ messages[-1]['content'] }}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{{ say(messages[0]) }}",
    "nulls dropped": "{% for m in messages %}{{ 'name' in m }}{{ m.name is defined }}{% endfor %}",
    "strftime": "{{ strftime_now('%d %b %Y') }}",
    "no autoescape": "{{ messages[0].content }}",
    "hidden attributes are undefined": "[{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format(messages) }}]",
}
REFUSED = {
    "class": "{{ ''.__class__.__mro__ }}",
    "dict class": "{{ dict.__class__.__base__ }}",
    "namespace underscore": "{% set ns = namespace(_x=1) %}",
    "namespace underscore later": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "huge range": "{% for i in range(999999999) %}{% endfor %}",
    "raise_exception": "{{ raise_exception('no thanks') }}",
    "undefined call": "{{ nothing() }}",
    "undefined concatenation": "{{ 'a' + messages[0].nothing }}",
    "type error": "{{ 1 + 'a' }}",
    "zero division": "{{ 1 / 0 }}",
}
SPECIAL = {"bos_token": "<s>"}


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    texts, _ = render_jinja_template(conversations=[messages], chat_template=source, **SPECIAL, **options)
    return str(texts[0])


@pytest.mark.parametrize("name", RENDERED)
def test_rendered_alike(name: str) -> None:
    source = RENDERED[name]
    ours = ChatTemplate(source, SPECIAL).render(MESSAGES, add_generation_prompt=False,
                                                template_kwargs={"enable_thinking": True})
    assert ours == theirs(source, MESSAGES, enable_thinking=True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_alike(name: str) -> None:
    source = REFUSED[name]
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever transformers lets through, ours must be a 400
        theirs(source, MESSAGES)
    with pytest.raises(ApiError) as raised:
        ChatTemplate(source, SPECIAL).render(MESSAGES)
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_the_clock_is_given() -> None:
    template = ChatTemplate(RENDERED["strftime"], {}, now=lambda: datetime(2031, 7, 5))
    assert template.render(MESSAGES) == "05 Jul 2031"


@pytest.mark.parametrize("keep", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content.rstrip() }}"])
@pytest.mark.parametrize("content", ["tail", "tail  ", " tail\n", "say CONTINUE_FINAL_MESSAGE_TAG twice", ""])
def test_continue_final_message(keep: str, content: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>" + keep + "</>{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs(source, messages, continue_final_message=True)


@pytest.mark.parametrize(("source", "messages"), [
    ("{{ messages[0].role }}", [{"role": "user", "content": "q"}]),
    ("{{ messages[0].content[:1] }}", [{"role": "user", "content": "question"}]),
    ("{{ messages[0].content }}", [{"role": "assistant", "tool_calls": []}]),
])
def test_nothing_to_continue(source: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="continue_final_message"):
        theirs(source, messages, continue_final_message=True)
    with pytest.raises(ApiError, match="continue_final_message"):
        ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=False, continue_final_message=True)
