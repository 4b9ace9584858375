"""The official `anthropic` and `openai` clients, unmodified: Messages, Responses and tools, through a gateway and at
the worker itself, on real sockets and a real worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from loadtests.local_stack import Child
from tests.support.gateway_in_process import running_gateway
from tests.support.tiny_worker import WORKER_TOKEN

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo", "Città di Castello"]}},
        "required": ["city"], "additionalProperties": False}
QUESTION = {"role": "user", "content": "how is the weather?"}
SYSTEM = "you are a helpful assistant that answers questions about the weather "
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": CITY}]
FUNCTIONS = [{"type": "function", "name": "weather", "description": "of a city", "parameters": CITY, "strict": True}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]


@dataclass
class Clients:
    """Both clients on one address."""

    messages: anthropic.AsyncAnthropic
    openai: openai.AsyncOpenAI
    is_gateway: bool


@pytest.fixture(params=["gateway", "worker"])
async def clients(request: pytest.FixtureRequest, tool_worker: Child) -> AsyncIterator[Clients]:
    if request.param == "worker":
        async with _clients(tool_worker.url, is_gateway=False) as both:
            yield both
        return
    async with running_gateway(tool_worker.url, worker_token=WORKER_TOKEN) as gateway:
        await gateway.until_exact()
        async with _clients(gateway.url, is_gateway=True) as both:
            yield both


class _clients:
    def __init__(self, url: str, *, is_gateway: bool) -> None:
        self._both = Clients(anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0),
                             openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), is_gateway)

    async def __aenter__(self) -> Clients:
        return self._both

    async def __aexit__(self, *exception: object) -> None:
        await self._both.messages.close()
        await self._both.openai.close()


def asked(**fields: Any) -> dict[str, Any]:
    """The client of today has no argument for the temperature; the API has one still."""
    sampling = {"temperature": 0, **fields.pop("extra_body", {})}
    return {"model": "tiny", "max_tokens": 24, "messages": [QUESTION], "extra_body": sampling, **fields}


async def test_a_message_whole_and_streamed(clients: Clients) -> None:
    whole = await clients.messages.messages.create(**asked(system=SYSTEM))
    [block] = whole.content
    assert block.type == "text"
    assert (whole.role, whole.type, whole.stop_reason) == ("assistant", "message", "max_tokens")
    assert whole.usage.output_tokens == 24
    async with clients.messages.messages.stream(**asked(system=SYSTEM)) as stream:
        names = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == 24
    assert streamed.usage.cache_read_input_tokens
    total = streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens
    assert total == (await clients.messages.messages.count_tokens(
        model="tiny", messages=[QUESTION], system=SYSTEM)).input_tokens


async def test_a_stop_sequence_is_named(clients: Clients) -> None:
    free = await clients.messages.messages.create(**asked())
    assert free.content[0].type == "text"
    stop = free.content[0].text[3:6]
    for stream in (False, True):
        if stream:
            async with clients.messages.messages.stream(**asked(stop_sequences=["never", stop])) as events:
                ended = await events.get_final_message()
        else:
            ended = await clients.messages.messages.create(**asked(stop_sequences=["never", stop]))
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)


async def test_a_tool_is_used_and_its_result_comes_back(clients: Clients) -> None:
    fields = asked(tools=TOOLS, tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
                   max_tokens=200, extra_body={"seed": 3, "temperature": 1})
    first = await clients.messages.messages.create(**fields)
    [used] = first.content
    assert used.type == "tool_use"
    assert (used.name, set(used.input), first.stop_reason) == ("weather", {"city"}, "tool_use")
    async with clients.messages.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    [again] = streamed.content
    assert again.type == "tool_use"
    assert (again.name, again.input) == (used.name, used.input)
    second = await clients.messages.messages.create(**asked(tools=TOOLS, messages=[
        QUESTION, {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]}]))
    assert second.usage.output_tokens


async def test_messages_errors_are_the_clients_own(clients: Clients) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        await clients.messages.messages.create(**asked(extra_body={"temperature": 7}))
    assert isinstance(bad.value.body, dict)
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["param"] == "temperature"
    with pytest.raises(anthropic.BadRequestError) as long:
        await clients.messages.messages.create(**asked(max_tokens=5000))
    assert isinstance(long.value.body, dict)
    assert long.value.body["error"]["param"] == "max_tokens"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await clients.messages.messages.create(**asked(model="another"))
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["type"] == "error"


async def test_a_response_whole_and_streamed(clients: Clients) -> None:
    asked: dict[str, Any] = {"model": "tiny", "instructions": SYSTEM, "input": "how is it?", "max_output_tokens": 12,
                             "temperature": 0}
    whole = await clients.openai.responses.create(**asked)
    assert (whole.status, whole.store) == ("incomplete", False)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    stream = await clients.openai.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    streamed = events[-1].response
    assert streamed.output_text == whole.output_text != ""
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert streamed.usage is not None
    assert streamed.usage.input_tokens_details.cached_tokens > 0
    assert streamed.usage.output_tokens == 12


async def test_a_response_that_calls_and_goes_on(clients: Clients) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": FUNCTIONS, "max_output_tokens": 200, "extra_body": {"seed": 3}}
    first = await clients.openai.responses.create(input=[QUESTION], tool_choice="required", parallel_tool_calls=False,
                                                  **asked)
    [call] = first.output
    assert call.type == "function_call"
    assert (first.status, call.name, set(json.loads(call.arguments))) == ("completed", "weather", {"city"})
    stream = await clients.openai.responses.create(input=[QUESTION], tool_choice="required", stream=True,
                                                   parallel_tool_calls=False, **asked)
    done = [event async for event in stream if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments]
    second = await clients.openai.responses.create(
        input=[QUESTION, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}], **asked)
    assert second.output


async def test_a_response_follows_a_schema(clients: Clients) -> None:
    answer = await clients.openai.responses.create(
        model="tiny", input="where?", temperature=1, extra_body={"seed": 1}, max_output_tokens=200,
        text={"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}})
    assert set(json.loads(answer.output_text)) == {"city"}


async def test_responses_refuse_what_needs_a_memory(clients: Clients) -> None:
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await clients.openai.responses.create(model="tiny", input="x", **fields)
        assert caught.value.param == next(iter(fields))


async def test_chat_tools_by_the_openai_client(clients: Clients) -> None:
    answer = await clients.openai.chat.completions.create(
        model="tiny", messages=[QUESTION], tools=CHAT_TOOLS, tool_choice="required", max_tokens=200, seed=3,
        parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "weather")
    assert set(json.loads(call.function.arguments)) == {"city"}


async def test_one_conversation_hits_whichever_api_it_comes_by(clients: Clients) -> None:
    """The same ids by all three APIs: what one left in the cache the others find, as the gateway predicts."""
    text = f"tell me about number {clients.is_gateway} of the weather " * 8
    chat = await clients.openai.chat.completions.create(model="tiny", max_tokens=1, messages=[
        {"role": "system", "content": SYSTEM}, {"role": "user", "content": text}])
    assert chat.usage is not None
    prompt = chat.usage.prompt_tokens
    message = await clients.messages.messages.with_raw_response.create(
        model="tiny", max_tokens=1, system=SYSTEM, messages=[{"role": "user", "content": text}])
    response = await clients.openai.responses.with_raw_response.create(
        model="tiny", max_output_tokens=1, instructions=SYSTEM, input=text)
    used, usage = (await message.parse()).usage, response.parse().usage
    assert usage is not None
    expected = min(prompt // 16 * 16, prompt - 1)
    assert used.cache_read_input_tokens == usage.input_tokens_details.cached_tokens == expected
    assert used.input_tokens + expected == usage.input_tokens == prompt
    if clients.is_gateway:
        for raw in (message, response):
            assert min(int(raw.headers["x-headstart-matched-tokens"]), prompt - 1) == expected


async def test_a_response_repeats_integers_of_any_size(clients: Clients) -> None:
    answer = await clients.openai.responses.with_raw_response.create(
        model="tiny", input="hi", max_output_tokens=2, extra_body={"metadata": {"a": 10**30}})
    assert answer.status_code == 200
    assert f'"metadata":{{"a":{10**30}}}' in answer.text
