"""A body in front of the memory of usual ones, against the same body without it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.prompt import usual_chat
from worker.prompt.requests import ChatRequest, parse_chat
from worker.prompt.usual_chat import REMEMBERED, REST_MAX_BYTES, parse_usual_chat
from worker.protocol.api_error import ApiError

CONTENTS = ['"hi"', '"h\u00e9 \U0001f600"', '"\\u00e9\\n\\"{["', '"\\ud800"', "null", "7", "[]",
            '[{"type":"text","text":"a"}]', f'"{"[{" * 40}"', f'{"[" * 70}{"]" * 70}']
ROLES = ['"user"', '"system"', '"nobody"', "[]", "null"]
MESSAGES = st.lists(st.builds(lambda role, content: f'{{"role":{role},"content":{content}}}', st.sampled_from(ROLES),
                              st.sampled_from(CONTENTS)), max_size=3).map(lambda every: f"[{','.join(every)}]")
RESTS = {
    "model": ['"m"', '"n"', "1", '"\u00e9"'], "stream": ["true", "false", "null", "1"],
    "max_tokens": ["1", "12", "0", "64"], "seed": ["1", "2"], "temperature": ["0", "0.5", '"hot"'],
    "stop": ['"a"', '["a","b"]', '["a,b"]', "[]"], "tools": ["null", '[{"type":"function","function":{"name":"f"}}]'],
    "chat_template_kwargs": ["{}", '{"a":[1]}'], "x\u00e9": ["1", '{"a":{"b":[]}}'], "n": ["2", "200000"],
}
PAIRS = st.sampled_from([(name, value) for name, values in RESTS.items() for value in values])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    pairs = [("model", '"m"'), *draw(st.lists(PAIRS, max_size=4))]
    if draw(st.integers(0, 9)):
        pairs.insert(draw(st.integers(0, len(pairs))), ("messages", draw(MESSAGES)))
    if draw(st.integers(0, 3)):
        pairs = [*dict(pairs).items()]      # without keys that come twice
    colon, comma = draw(st.sampled_from([(":", ","), (":", ","), (": ", ", ")]))
    text = "{" + comma.join(f'"{name}"{colon}{value}' for name, value in pairs) + "}"
    return text.encode()[:draw(st.sampled_from([None, None, None, -1]))]


def outcome(parse: object, body: bytes) -> ChatRequest | tuple[int, str | None, str]:
    try:
        return parse(body)  # type: ignore[operator,no-any-return]
    except ApiError as error:
        return error.status, error.param, error.message


@given(st.lists(bodies(), min_size=1, max_size=6))
def test_the_memory_says_what_the_parser_says(given_bodies: list[bytes]) -> None:
    for body in [*given_bodies, *given_bodies]:
        assert outcome(parse_usual_chat, body) == outcome(parse_chat, body)


def body_of(content: str, **more: object) -> bytes:
    return orjson.dumps({"model": "m", **more, "messages": [{"role": "user", "content": content}]})


def test_what_is_remembered_is_bounded_and_nothing_that_may_change_is_shared() -> None:
    usual_chat._said.clear()
    for number in range(REMEMBERED + 3):
        parse_usual_chat(body_of("x", seed=number))
    assert 0 < len(usual_chat._said) <= REMEMBERED
    assert all(not request.messages for request in usual_chat._said.values()), "texts are never kept"
    usual_chat._said.clear()
    parse_usual_chat(body_of("x", user="u" * REST_MAX_BYTES))
    parse_usual_chat(body_of("x", tools=[{"type": "function", "function": {"name": "f"}}]))
    parse_usual_chat(body_of("x", chat_template_kwargs={"a": 1}))
    assert not usual_chat._said


@pytest.mark.parametrize("text", ["plain", "h\u00e9", "\U0001f600", "code[{" * 40])
def test_the_next_of_its_kind_is_known(text: str) -> None:
    usual_chat._said.clear()
    parse_usual_chat(body_of(text.upper(), seed=5))
    known = dict(usual_chat._said)
    request = parse_usual_chat(body_of(text, seed=5))
    assert usual_chat._said == known
    assert request.messages[0]["content"] == text
