"""Good bodies and what becomes of them; tests/scenarios/test_bad_requests.py holds the bad ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.prompt import request_schema as limits
from worker.prompt.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.api_error import ApiError

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": HI, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def test_the_smallest_chat() -> None:
    assert chat() == ChatRequest(model="m", sampling=SamplingParams(), seed_given=False, max_tokens=None,
                                 messages=({"role": "user", "content": "hi"},), tool_choice="none")


def test_the_smallest_completion_has_openais_limit() -> None:
    assert completion() == CompletionRequest(model="m", sampling=SamplingParams(), seed_given=False, max_tokens=16,
                                             max_tokens_is_default=True, prompts=("hi",))


def test_a_given_limit_is_no_default() -> None:
    assert not completion(max_tokens=16).max_tokens_is_default
    assert not chat(max_tokens=16).max_tokens_is_default


def test_null_is_absent() -> None:
    names = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stream", "stream_options", "seed",
             "logit_bias", "logprobs", "user", "cache_salt", "priority", "response_format", "min_tokens"]
    nulls = dict.fromkeys(names)
    assert chat(**nulls, tools=None, tool_choice=None, chat_template_kwargs=None, top_logprobs=None) == chat()
    assert completion(**nulls, echo=None, suffix=None, best_of=None) == completion()


def test_every_sampling_field() -> None:
    asked = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
             "presence_penalty": -1, "frequency_penalty": 2, "seed": -7, "min_tokens": 3, "ignore_eos": True}
    request = completion(**asked, logit_bias={"5": -100, "0": 2.5}, logprobs=0)
    assert request.sampling == SamplingParams(**asked, logit_bias={5: -100.0, 0: 2.5}, logprobs=0)
    assert request.seed_given
    assert (request.min_tokens, request.ignore_eos) == (3, True)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, None), (0, None), (1, 1), (limits.MAX_TOKEN_ID, 2**32 - 1)])
def test_top_k_is_turned_off_the_way_vllms_clients_do(top_k: int, expected: int | None) -> None:
    assert chat(top_k=top_k).sampling.top_k == expected


@pytest.mark.parametrize("fields", [
    {"temperature": 0}, {"temperature": 2}, {"temperature": 1e-300}, {"repetition_penalty": 0.01},
    {"repetition_penalty": 100}, {"top_p": 0}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1}, {"n": 1},
    {"n": limits.MAX_N}, {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"max_tokens": 1}, {"max_tokens": 2**31 - 1},
    {"stop": ["x"] * limits.MAX_STOPS}, {"stop": "x" * limits.MAX_STOP_CHARS}, {"logit_bias": {}},
    {"logit_bias": {str(limits.MAX_TOKEN_ID): 100}}, {"cache_salt": "x" * limits.MAX_LABEL_CHARS},
    {"priority": -(2**31)}, {"min_tokens": 4, "max_tokens": 4}, {"response_format": {"type": "text"}}, {"user": ""},
])
def test_limits_are_inclusive(fields: dict[str, Any]) -> None:
    chat(**fields)
    completion(**fields)


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=7, max_tokens=5).max_tokens == 7


@pytest.mark.parametrize(("asked", "expected"), [
    ({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20),
    ({"logprobs": False, "top_logprobs": 0}, None),
])
def test_chat_logprobs(asked: dict[str, Any], expected: int | None) -> None:
    assert chat(**asked).sampling.logprobs == expected


def test_stop() -> None:
    assert chat(stop="\n").stop == ("\n",)
    assert chat(stop=["a", "b"]).stop == ("a", "b")
    assert chat(stop=[]).stop == ()


def test_streaming() -> None:
    assert not chat(stream=False).stream
    assert chat(stream=True).stream
    assert not chat(stream=True).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_obfuscation": False}).include_usage


def test_unknown_fields_are_listed_not_refused() -> None:
    request = chat(store=True, metadata={"a": [1]}, service_tier="auto", parallel_tool_calls=True)
    assert request.unknown == ("store", "metadata", "service_tier")


def test_extras() -> None:
    request = chat(cache_salt="s", priority=-3, user="u", prompt_cache_key="k", prompt_cache_retention="24h",
                   return_token_ids=True)
    assert (request.cache_salt, request.priority, request.user) == ("s", -3, "u")
    assert (request.prompt_cache_key, request.prompt_cache_retention) == ("k", "24h")
    assert request.return_token_ids


def test_messages_stay_as_they_were_sent() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a", "extra": 1}]},
        {"role": "user", "content": "", "name": "ada", "x": {"y": [None]}},
        {"role": "assistant", "content": None, "refusal": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "1", "content": "result"},
        {"role": "assistant", "content": "done", "tool_calls": None},
    ]
    assert list(chat(messages=messages).messages) == messages


@pytest.mark.parametrize("role", [[], {}, None, 1, "nobody"])
def test_a_role_that_is_none_is_the_clients_mistake(role: object) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=[{"role": role, "content": "hi"}])
    assert (refused.value.status, refused.value.param) == (400, "messages[0].role")


def test_tools() -> None:
    assert chat(tools=[TOOL]).tools == (TOOL,)
    assert chat(tools=[TOOL]).tool_choice == "auto"
    assert chat(tools=[TOOL], tool_choice="none").tool_choice == "none"
    assert chat(tool_choice="none").tools is None
    assert chat(tools=[TOOL], tool_choice="required").tool_choice == "required"
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}, parallel_tool_calls=False)
    assert (named.tool_choice, named.forced_tool, named.parallel_tool_calls) == ("named", "f", False)
    assert [chat(tools=[TOOL], tool_choice=choice).may_call_tools for choice in (None, "none")] == [True, False]


def test_response_format() -> None:
    assert chat(response_format={"type": "text"}).response_schema is None
    assert chat(response_format={"type": "json_object"}).response_schema == '{"type":"object"}'
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"b": 1, "a": [None]}}}
    assert completion(response_format=wanted).response_schema == '{"b":1,"a":[null]}'


def test_template_options() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False)
    assert request.chat_template_kwargs == {"enable_thinking": False}
    assert not request.add_generation_prompt
    assert chat().add_generation_prompt
    continued = chat(continue_final_message=True)
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)


@pytest.mark.parametrize(("prompt", "expected"), [
    ("hi", ("hi",)), ("", ("",)), (["a", "b"], ("a", "b")), ([1, 2, 3], ((1, 2, 3),)),
    ([[1], [2, 3], []], ((1,), (2, 3), ())), ([0], ((0,),)), ([limits.MAX_TOKEN_ID], ((2**32 - 1,),)),
])
def test_prompt_kinds(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_harmless_completion_options() -> None:
    assert completion(echo=False, suffix="", best_of=1) == completion()
    assert completion(n=3, best_of=3).n == 3
    assert completion(n=3, best_of=3).num_candidates == 3
    assert completion(n=3, best_of=5).num_candidates == 5
    assert completion(echo=True, stream=True).echo
    assert completion(max_tokens=None).max_tokens == limits.DEFAULT_COMPLETION_MAX_TOKENS


def test_tokenize_defaults_are_opposite() -> None:
    prompt = parse_tokenize(b'{"prompt":"hi"}')
    messages = parse_tokenize(json.dumps({"messages": HI}).encode())
    assert (prompt.add_special_tokens, messages.add_special_tokens) == (True, False)
    assert (prompt.messages, messages.prompt, messages.add_generation_prompt) == (None, None, True)
    assert not parse_tokenize(b'{"prompt":"hi","add_special_tokens":false}').add_special_tokens
    assert parse_tokenize(b'{"prompt":"","return_token_strs":true,"model":"m","x":1}').unknown == ("x",)


def test_detokenize() -> None:
    request = parse_detokenize(b'{"model":"m","tokens":[1,2],"y":0}')
    assert (request.model, request.tokens, request.unknown) == ("m", (1, 2), ("y",))
    assert parse_detokenize(b'{"tokens":[]}').tokens == ()


def test_results_are_frozen() -> None:
    with pytest.raises(AttributeError):
        chat().model = "other"  # type: ignore[misc]
