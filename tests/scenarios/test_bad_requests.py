"""What clients get wrong, as a table: every body is a 400 `invalid_request` that names the field.

The bodies go through the same parsers that worker and gateway call; how a server renders the error is tested there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from worker.prompt import messages as message_limits
from worker.prompt import request_schema as limits
from worker.prompt.grammar_spec import MAX_OPTIONAL_PROPERTIES
from worker.prompt.json_body import MAX_JSON_DEPTH
from worker.prompt.requests import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from worker.protocol.api_error import ApiError

HI = [{"role": "user", "content": "hi"}]


class Case(NamedTuple):
    name: str
    body: bytes
    param: str | None
    says: str = ""


def chat(param: str | None, says: str = "", /, *, name: str = "", **fields: Any) -> Case:
    """A chat body that is right but for `fields`; `...` takes a field away."""
    return _case({"model": "m", "messages": HI}, param, says, name, fields)


def completion(param: str | None, says: str = "", /, *, name: str = "", **fields: Any) -> Case:
    return _case({"model": "m", "prompt": "hi"}, param, says, name, fields)


def _case(right: dict[str, Any], param: str | None, says: str, name: str, fields: dict[str, Any]) -> Case:
    body = {key: value for key, value in {**right, **fields}.items() if value is not ...}
    name = name or ", ".join(f"{key}={str(value)[:40]}" for key, value in fields.items())
    return Case(name, json.dumps(body).encode(), param, says)


def content(value: Any, param: str, says: str = "", role: str = "user") -> Case:
    return chat(param, says, messages=[{"role": role, "content": value}], name=f"{role} content {str(value)[:40]}")


def tool_calls(value: Any, param: str, says: str = "") -> Case:
    return chat(param, says, messages=[*HI, {"role": "assistant", "tool_calls": value}],
                name=f"tool_calls {str(value)[:60]}")


MALFORMED = [
    Case("empty", b"", None, "not valid JSON"),
    Case("not JSON", b"hello", None, "not valid JSON"),
    Case("cut off", b'{"model":"m","messages":[{"role":"user"', None, "not valid JSON"),
    Case("two values", b'{"model":"m"} {}', None, "not valid JSON"),
    Case("trailing comma", b'{"model":"m",}', None, "not valid JSON"),
    Case("single quotes", b"{'model':'m'}", None, "not valid JSON"),
    Case("byte order mark", b'\xef\xbb\xbf{"model":"m"}', None, "not valid JSON"),
    Case("raw control character", b'{"model":"a\nb"}', None, "not valid JSON"),
    Case("NaN", b'{"model":"m","temperature":NaN}', "temperature", "NaN"),
    Case("Infinity", b'{"model":"m","temperature": Infinity,"n":1}', "temperature", "Infinity"),
    Case("-Infinity", b'{"model":"m","temperature":-Infinity}', "temperature", "Infinity"),
    Case("NaN deep inside", b'{"user":"NaN \\"]{","stop":[1,{"a":[]},{"b":{"c":[{}, NaN]}}],"n":NaN}', "stop", "NaN"),
    Case("NaN in an unknown field", b'{"m":{},"x":[[NaN]]}', "x", "NaN"),
    Case("NaN behind a duplicate key", b'{"n":1,"n":NaN}', "n", "twice"),
    Case("NaN alone", b"NaN", None), Case("NaN in an array", b"[NaN]", None),
    Case("NaN too deep", b'{"x":' + b"[" * 100 + b"NaN", None, "not valid JSON"),
    Case("NaN where a comma belongs", b'{"n":1 NaN}', None, "not valid JSON"),
    Case("NaN as a key", b'{NaN:1}', None, "not valid JSON"),
    Case("array", b"[1]", None, "must be a JSON object"),
    Case("string", b'"model"', None, "must be a JSON object"),
    Case("null", b"null", None, "must be a JSON object"),
    Case("invalid UTF-8", b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', None, "not valid UTF-8"),
    Case("invalid UTF-8 in an unknown field", b'{"model":"m","x":"\xc3\x28"}', None, "not valid UTF-8"),
    Case("UTF-8 surrogate", b'{"model":"\xed\xa0\x80"}', None, "not valid UTF-8"),
    Case("lone high surrogate", b'{"model":"m\\ud800 and more text"}', None, "not valid JSON"),
    Case("lone high surrogate at the end", b'{"model":"m\\ud800"}', None, "surrogate"),
    Case("an escaped backslash is no surrogate", b'{"model":"m\\\\ud800","n":', None, "truncated"),
    Case("lone low surrogate", b'{"model":"m\\udc00 and more text"}', None, "not valid JSON"),
    Case("lone surrogate in an unknown field", b'{"model":"m","x":"\\udfff and more text"}', None, "not valid JSON"),
    Case("too many brackets", b"[" * 200_000, None),
    Case("deep unknown field", b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "deeper than"),
    Case("duplicate key", b'{"model":"a","messages":[],"model":"b"}', "model", "twice"),
    Case("duplicate key, equal values", b'{"model":"a","model":"a"}', "model", "twice"),
    Case("duplicate key, longer value first", b'{"n":12,"n":1}', "n", "twice"),
    Case("duplicate key, longer value last", b'{"n":1,"n":12}', "n", "twice"),
    Case("duplicate key, escaped", b'{"user":"a","\\u0075ser":"b"}', "user", "twice"),
    Case("duplicate unknown key", b'{"x":[1,2],"y":0,"x":[1,2]}', "x", "twice"),
    Case("number too large for a float", b'{"model":"m","temperature":1e999}', "temperature"),
]

OPTIONAL = {"properties": {str(number): {} for number in range(1 + MAX_OPTIONAL_PROPERTIES // 2)}, "required": []}
MANY_PARAMETERS = [{"type": "function", "function": {"name": "f", "parameters": {"items": [OPTIONAL, OPTIONAL]}}}]

CHAT = [
    Case("deep known field", b'{"model":"m","messages":[{"role":"user","content":"hi","x":'
         + b'{"a":' * MAX_JSON_DEPTH + b"1" + b"}" * MAX_JSON_DEPTH + b"}]}", None, "deeper than"),
    chat("model", "Missing", model=...), chat("model", model=""), chat("model", model=7), chat("model", model=None),
    chat("messages", "Missing", messages=...), chat("messages", "at least one", messages=[]),
    chat("messages", messages="hi"), chat("messages", messages=None), chat("messages[0]", messages=["hi"]),
    chat("messages[1].role", "unknown role 'robot'", messages=[*HI, {"role": "robot", "content": "hi"}]),
    chat("messages[0].role", messages=[{"content": "hi"}]), chat("messages[0].role", messages=[{"role": 1}]),
    chat("messages[0].role", messages=[{"role": "function", "content": "x", "name": "f"}]),
    chat("messages[0].name", messages=[{"role": "user", "content": "x", "name": 5}]),
    chat("messages", "at most", messages=HI * (message_limits.MAX_MESSAGES + 1), name="too many messages"),
    content(None, "messages[0].content", "required"), content(5, "messages[0].content"),
    content({}, "messages[0].content"), content([], "messages[0].content"), content(True, "messages[0].content"),
    content(None, "messages[0].content", "required", role="assistant"),
    content(["hi"], "messages[0].content[0]"), content([{"text": "hi"}], "messages[0].content[0].type"),
    content([{"type": "text"}], "messages[0].content[0].text"),
    content([{"type": "text", "text": None}], "messages[0].content[0].text"),
    content([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "messages[0].content[1]", "text only"),
    content([{"type": "input_audio"}], "messages[0].content[0]", "text only"),
    content([{"type": "hologram"}], "messages[0].content[0]", "unknown type"),
    tool_calls([], "messages[1].tool_calls"), tool_calls("f()", "messages[1].tool_calls"),
    tool_calls([5], "messages[1].tool_calls[0]"),
    tool_calls([{"type": "function"}], "messages[1].tool_calls[0].function"),
    tool_calls([{"type": "custom", "function": {}}], "messages[1].tool_calls[0].type"),
    tool_calls([{"function": {"arguments": "{}"}}], "messages[1].tool_calls[0].function.name"),
    tool_calls([{"function": {"name": "f", "arguments": 5}}], "messages[1].tool_calls[0].function.arguments"),
    chat("messages[0].tool_calls", "assistant role",
         messages=[{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]),
    chat("messages[0].tool_call_id", messages=[{"role": "tool", "content": "x", "tool_call_id": 1}]),
    chat("tools", tools=[]), chat("tools", tools={}), chat("tools[0].type", tools=[{"type": "retrieval"}]),
    chat("tools[0].function", tools=[{"type": "function"}]),
    chat("tools[0].function.name", tools=[{"type": "function", "function": {"name": ""}}]),
    chat("tools[0].function.parameters",
         tools=[{"type": "function", "function": {"name": "f", "parameters": "{}"}}]),
    chat("tool_choice", "must be", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="any"),
    chat("tool_choice", "none of the tools", tools=[{"type": "function", "function": {"name": "f"}}],
         tool_choice={"type": "function", "function": {"name": "g"}}),
    chat("tool_choice", "must be", tools=[{"type": "function", "function": {"name": "f"}}],
         tool_choice={"type": "function", "name": "f"}),
    chat("tool_choice", "only allowed when tools", tool_choice="auto"),
    chat("tool_choice", "only allowed when tools", tool_choice="required"),
    chat("response_format", "not supported", response_format={"type": "xml"}),
    chat("response_format", "needs json_schema.schema", response_format={"type": "json_schema"}),
    chat("response_format.json_schema.schema", response_format={"type": "json_schema", "json_schema": {"schema": 5}}),
    chat("response_format", "at most 1000", name="too many optional properties", response_format={
        "type": "json_schema", "json_schema": {"schema": {"$defs": {"a": OPTIONAL}, "anyOf": [OPTIONAL]}}}),
    chat("tools", "at most 1000", name="too many optional parameters", tool_choice="required", tools=MANY_PARAMETERS),
    chat("tools", "at most 1000", name="too many optional parameters beside a schema", tools=MANY_PARAMETERS,
         response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
    chat("functions", "use tools", functions=[]), chat("function_call", "use tool_choice", function_call="auto"),
    chat("top_logprobs", "logprobs is true", top_logprobs=3), chat("logprobs", logprobs=5),
    chat("top_logprobs", logprobs=True, top_logprobs=21), chat("top_logprobs", logprobs=True, top_logprobs=-1),
    chat("max_completion_tokens", max_completion_tokens=0),
    chat("chat_template", "--chat-template", chat_template="{{ messages }}"),
    chat("chat_template_kwargs", chat_template_kwargs=[]),
    chat("chat_template_kwargs.tools", chat_template_kwargs={"tools": []}),
    chat("continue_final_message", "exclude", continue_final_message=True, add_generation_prompt=True),
]

SHARED: list[dict[str, Any]] = [
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 2**31}, {"max_tokens": 1.5}, {"max_tokens": "5"},
    {"max_tokens": True}, {"max_tokens": 10**400}, {"temperature": -0.1}, {"temperature": 2.1},
    {"temperature": "1"}, {"temperature": True}, {"top_p": -0.1}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5},
    {"top_k": 10**30}, {"min_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0}, {"repetition_penalty": 1e-38},
    {"repetition_penalty": 0.0099}, {"repetition_penalty": 100.1}, {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1}, {"seed": 2**63}, {"seed": -(2**63) - 1}, {"seed": 0.5}, {"seed": True}, {"n": 0},
    {"n": -1}, {"n": limits.MAX_N + 1}, {"n": True}, {"stop": ""}, {"stop": 5}, {"stop": ["x"] * 17},
    {"stop": "x" * (limits.MAX_STOP_CHARS + 1)}, {"stream": 1}, {"stream": "true"}, {"stream_options": {}},
    {"stream_options": {"include_usage": True}}, {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4},
    {"ignore_eos": 1}, {"return_token_ids": "yes"}, {"cache_salt": ""}, {"cache_salt": 5},
    {"cache_salt": "x" * (limits.MAX_LABEL_CHARS + 1)}, {"priority": 0.5}, {"priority": 2**31}, {"user": 7},
    {"prompt_cache_key": {}}, {"logit_bias": []}, {"logit_bias": {"x": 1}}, {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1.0": 1}}, {"logit_bias": {" 1": 1}}, {"logit_bias": {"٣": 1}}, {"logit_bias": {"": 1}},
    {"logit_bias": {str(2**32): 1}}, {"logit_bias": {"9" * 5_000: 1}}, {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": "x"}}, {"logit_bias": {str(i): 0 for i in range(limits.MAX_LOGIT_BIAS_TOKENS + 1)}},
    {"response_format": "text"},
]

COMPLETION = [
    completion("prompt", "Missing", prompt=...), completion("prompt", prompt=None), completion("prompt", prompt=5),
    completion("prompt", "empty list", prompt=[]), completion("prompt", prompt={}),
    completion("prompt[1]", prompt=["a", 1]), completion("prompt[1]", prompt=[1, "a"]),
    completion("prompt[1]", prompt=[1, [2]]), completion("prompt[0]", prompt=[-1]),
    completion("prompt[0]", prompt=[1.5]), completion("prompt[1]", prompt=[1, True]),
    completion("prompt[0][1]", prompt=[[1, -5]]), completion("prompt[1][0]", prompt=[[1], ["a"]]),
    completion("prompt[0]", prompt=[2**32]), completion("prompt[0]", prompt=[10**40]),
    completion("prompt", "at most", prompt=["a"] * (limits.MAX_PROMPTS + 1), name="too many prompts"),
    completion("n", "number of prompts", prompt=["a"] * 512, n=2, name="too many sequences"),
    completion("logprobs", logprobs=True), completion("logprobs", logprobs=21), completion("logprobs", logprobs=-1),
    completion("echo", "streamed", echo=True, logprobs=0, stream=True),
    completion("suffix", "not supported", suffix="end"),
    completion("best_of", "streamed", best_of=2, stream=True), completion("best_of", best_of=0),
    completion("best_of", "less than n", best_of=2, n=3), completion("best_of", best_of=limits.MAX_N + 1),
    completion("best_of", "at most", best_of=100, prompt=["a"] * 6),
]

Parse = Callable[[bytes], object]
ALL = [
    *((parse_chat, case) for case in [*MALFORMED, *CHAT]),
    *((parse_completion, case) for case in [*MALFORMED, *COMPLETION]),
    *((parse_chat, chat(next(iter(fields)), **fields)) for fields in SHARED),
    *((parse_completion, completion(next(iter(fields)), **fields)) for fields in SHARED),
]


@pytest.mark.parametrize(("parse", "case"), [
    pytest.param(parse, case, id=f"{parse.__name__}: {case.name}") for parse, case in ALL])
def test_bad_body(parse: Parse, case: Case) -> None:
    with pytest.raises(ApiError) as raised:
        parse(case.body)
    error = raised.value
    assert (error.status, error.code) == (400, "invalid_request")
    assert error.param == case.param
    assert case.says.lower() in error.message.lower()
    assert len(error.message) < 600  # a complaint never repeats the body
    assert error.body()["error"] == {"message": error.message, "type": "invalid_request_error", "param": error.param,
                                     "code": "invalid_request"}


@pytest.mark.parametrize(("body", "param"), [
    ({}, "prompt"), ({"prompt": "a", "messages": HI}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"messages": []}, "messages"), ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ({"messages": HI, "chat_template": "x"}, "chat_template"), ({"messages": HI, "tools": []}, "tools"),
])
def test_bad_tokenize(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_tokenize(json.dumps(body).encode())
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(("body", "param"), [
    ({}, "tokens"), ({"tokens": "1"}, "tokens"), ({"tokens": [-1]}, "tokens[0]"),
    ({"tokens": [1, 2**32]}, "tokens[1]"), ({"tokens": [True]}, "tokens[0]"),
])
def test_bad_detokenize(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_detokenize(json.dumps(body).encode())
    assert (raised.value.status, raised.value.param) == (400, param)
