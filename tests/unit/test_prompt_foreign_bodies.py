"""Messages and Responses bodies as chat bodies: what a conversation becomes, and which field a complaint names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.prompt.foreign_api import ForeignApi
from worker.prompt.messages_body import COUNT_TOKENS, MESSAGES
from worker.prompt.output_shape import ToolChoice
from worker.prompt.requests import ChatRequest
from worker.prompt.responses_body import RESPONSES
from worker.protocol.api_error import ApiError

USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, USER,
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, {"role": "user", "content": "Thanks"}]


def read(api: ForeignApi, **fields: Any) -> ChatRequest:
    return api.read(json.dumps({"model": "m", **fields}).encode()).parsed


def messages(**fields: Any) -> ChatRequest:
    return read(MESSAGES, **{"max_tokens": 9, "messages": [USER], **fields})


def responses(**fields: Any) -> ChatRequest:
    return read(RESPONSES, **{"input": "hi", **fields})


def test_one_conversation_is_the_same_chat_by_either_api() -> None:
    by_messages = messages(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                           messages=[
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"},
                                          {"type": "text", "text": "Let me look."},
                                          {"type": "tool_use", "id": "call_1", "name": "weather",
                                           "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [
            {"type": "text", "text": "sunny"}]}, {"type": "text", "text": "Thanks"}]}])
    by_responses = responses(instructions="Be brief.", input=[
        USER, {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me look.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"role": "user", "content": [{"type": "input_text", "text": "Thanks"}]}])
    assert list(by_messages.messages) == list(by_responses.messages) == CONVERSATION


def test_several_calls_of_one_turn_are_one_message() -> None:
    calls = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in ("a", "b")]
    said = responses(input=[USER, *calls]).messages[1]
    assert said["content"] is None
    assert [call["id"] for call in said["tool_calls"]] == ["a", "b"]


def test_messages_settings() -> None:
    read = messages(stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=5, stream=True, seed=3, cache_salt="s",
                    metadata={"user_id": "u"}, cache_control={"type": "ephemeral"}, service_tier="auto",
                    thinking={"type": "disabled"},
                    output_config={"format": {"type": "json_schema", "schema": WEATHER}})
    assert (read.stop, read.sampling.temperature, read.sampling.top_p, read.sampling.top_k) == (("x",), 0.5, 0.9, 5)
    assert (read.max_tokens, read.stream, read.include_usage, read.sampling.seed) == (9, True, True, 3)
    assert (read.cache_salt, read.user) == ("s", "u")
    assert read.chat_template_kwargs == {"enable_thinking": False}
    assert json.loads(read.response_schema or "") == WEATHER


def test_responses_settings() -> None:
    read = responses(max_output_tokens=7, temperature=0.5, top_p=0.9, stream=True, store=True, background=False,
                     previous_response_id=None, metadata={"a": "b"}, include=["message.output_text.logprobs"],
                     top_logprobs=2, parallel_tool_calls=False, priority=4,
                     text={"format": {"type": "json_schema", "name": "w", "schema": WEATHER}, "verbosity": "low"})
    assert (read.max_tokens, read.sampling.temperature, read.sampling.top_p, read.priority) == (7, 0.5, 0.9, 4)
    assert (read.stream, read.include_usage, read.sampling.logprobs) == (True, True, 2)
    assert json.loads(read.response_schema or "") == WEATHER


@pytest.mark.parametrize(("choice", "kind", "name"), [
    ({"type": "auto"}, ToolChoice.AUTO, None), ({"type": "any"}, ToolChoice.REQUIRED, None),
    ({"type": "none"}, ToolChoice.NONE, None), ({"type": "tool", "name": "weather"}, ToolChoice.NAMED, "weather")])
def test_messages_tools(choice: dict[str, Any], kind: ToolChoice, name: str | None) -> None:
    read = messages(tools=[{"name": "weather", "description": "d", "input_schema": WEATHER, "cache_control": None}],
                    tool_choice={**choice, "disable_parallel_tool_use": True})
    assert read.tools == ({"type": "function", "function": {"name": "weather", "description": "d",
                                                            "parameters": WEATHER}},)
    assert (read.tool_choice, read.forced_tool, read.parallel_tool_calls) == (kind, name, False)


def test_responses_tools() -> None:
    read = responses(tools=[{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}],
                     tool_choice={"type": "function", "name": "weather"})
    assert read.tools == ({"type": "function", "function": {"name": "weather", "parameters": WEATHER,
                                                            "strict": True}},)
    assert (read.tool_choice, read.forced_tool) == (ToolChoice.NAMED, "weather")


def test_an_answer_that_the_client_began_is_continued() -> None:
    read = messages(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert (read.continue_final_message, read.add_generation_prompt) == (True, False)


def test_counting_needs_no_max_tokens() -> None:
    assert COUNT_TOKENS.read(json.dumps({"model": "m", "messages": [USER]}).encode()).parsed.messages == (USER,)


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(("fields", "param"), [
    ({"messages": []}, "messages"), ({"max_tokens": 0}, "max_tokens"), ({"messages": [{"role": "x"}]},
                                                                         "messages[0].role"),
    (block(type="image", source={}), "messages[0].content[0]"), (block(type="text"), "messages[0].content[0].text"),
    (block(type="tool_result"), "messages[0].content[0].tool_use_id"), (block(), "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"system": [{"type": "image"}]}, "system[0]"), ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"), ({"tools": [{"name": "", "input_schema": {}}]},
                                                            "tools[0].name"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"), ({"thinking": {"type": "x"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"messages": [USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "messages")])
def test_messages_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages(**fields)
    error = MESSAGES.error(caught.value)
    assert (error.status, error.param) == (400, param)
    body: Any = error.body()
    assert (body["type"], body["error"]["type"], body["error"]["param"]) == ("error", "invalid_request_error", param)


@pytest.mark.parametrize(("fields", "param"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": {"id": "c"}}, "conversation"),
    ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"), ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include[0]"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"input": []}, "input"), ({"input": [5]}, "input[0]"), ({"input": [{"type": "item_reference", "id": "x"}]},
                                                             "input[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"), ({"input": [{"role": "robot", "content": "x"}]},
                                                                 "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"), ({"temperature": -1}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema")])
def test_responses_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        responses(**fields)
    error = RESPONSES.error(caught.value)
    assert (error.status, error.param) == (400, param)
    body: Any = error.body()
    assert (set(body), body["error"]["param"]) == ({"error"}, param)


def test_duplicate_keys_are_refused() -> None:
    for api, rest in ((MESSAGES, b'"max_tokens": 1, "messages": []'), (RESPONSES, b'"input": "x"')):
        with pytest.raises(ApiError) as caught:
            api.read(b'{"model": "a", "model": "b", ' + rest + b"}")
        assert caught.value.param == "model"
