"""Schemas and tools through the official client, against a real worker whose template knows tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from loadtests.local_stack import Child
from tests.support.json_schemas import random_schema
from tests.support.tiny_worker import until_idle, worker_client

MESSAGES = [{"role": "user", "content": "how is the weather?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo", "Città di Castello"]}},
        "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
         {"type": "function", "function": {"name": "time", "parameters": CITY}}]


@pytest.fixture
async def api(tool_worker: Child) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{tool_worker.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 200, "seed": 3, **fields}


async def test_json_schema_whole_and_streamed(api: openai.AsyncOpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    whole = await api.chat.completions.create(**asked(response_format=wanted, n=3))
    for choice in whole.choices:
        assert set(json.loads(choice.message.content or "")) == {"city"}
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
    texts = ["", "", ""]
    async for chunk in await api.chat.completions.create(**asked(response_format=wanted, n=3), stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


async def test_json_object_begins_as_one(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(model="tiny", prompt="hello", max_tokens=40, seed=1,
                                          extra_body={"response_format": {"type": "json_object"}})
    assert answer.choices[0].text.lstrip().startswith("{")


@pytest.mark.parametrize("schema", [{"type": "objekt"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
async def test_a_bad_schema_is_the_clients_mistake(api: openai.AsyncOpenAI, schema: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            await api.chat.completions.create(stream=stream, **asked(
                n=2, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
        assert error.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as error:
        await api.chat.completions.create(**asked(tool_choice="required", tools=[
            {"type": "function", "function": {"name": "f", "parameters": schema}}]))
    assert error.value.param == "tools"


async def test_a_schema_beyond_the_limit_is_refused(api: openai.AsyncOpenAI) -> None:
    schema = {"enum": ["x" * 1000] * 300}
    with pytest.raises(openai.BadRequestError, match="at most") as error:
        await api.chat.completions.create(**asked(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
    assert error.value.param == "response_format"


@pytest.mark.parametrize(("choice", "names"), [
    ("required", {"weather", "time"}), ({"type": "function", "function": {"name": "time"}}, {"time"})])
async def test_forced_calls_whole_and_streamed(api: openai.AsyncOpenAI, choice: Any, names: set[str]) -> None:
    fields = asked(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    whole = (await api.chat.completions.create(**fields)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    [call] = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in names
    assert set(json.loads(call.function.arguments)) == {"city"}
    streamed, reasons, content = [], [], ""
    async for chunk in await api.chat.completions.create(**fields, stream=True):
        for item in chunk.choices:
            streamed += item.delta.tool_calls or []
            reasons += [item.finish_reason] if item.finish_reason else []
            content += item.delta.content or ""
    assert (len(streamed), reasons, content) == (1, ["tool_calls"], "")
    [delta] = streamed
    assert delta.function is not None
    assert (delta.index, delta.function.name, delta.function.arguments) == (
        0, call.function.name, call.function.arguments)
    assert delta.id
    assert delta.id.startswith("call_")


async def test_parallel_calls_are_numbered_and_go_back_into_the_template(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(**asked(tools=TOOLS, tool_choice="required", n=4))
    most = max(answer.choices, key=lambda item: len(item.message.tool_calls or []))
    assert len(most.message.tool_calls or []) > 1
    ids = [call.id for item in answer.choices for call in item.message.tool_calls or []]
    assert len(set(ids)) == len(ids)
    assert (await api.chat.completions.create(**asked(tools=TOOLS))).choices[0].finish_reason in ("stop", "length")


async def test_auto_parses_what_the_model_writes(api: openai.AsyncOpenAI) -> None:
    """The grammar of the answer stands in for a model that has learnt to call: with `auto` it may do either."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["no tool needed"]}}}
    answer = await api.chat.completions.create(**asked(
        tools=TOOLS[:1], response_format=wanted, parallel_tool_calls=False, n=12))
    reasons = {item.finish_reason for item in answer.choices}
    assert reasons == {"stop", "tool_calls"}
    for item in answer.choices:
        called = item.finish_reason == "tool_calls"
        assert bool(item.message.tool_calls) == called
        assert called or json.loads(item.message.content or "") == "no tool needed"


async def test_none_neither_shows_nor_reads_tools(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(**asked(tools=TOOLS, tool_choice="none", max_tokens=8))
    plain = await api.chat.completions.create(**asked(max_tokens=8))
    assert answer.choices[0].message.content == plain.choices[0].message.content


async def test_nothing_is_left_behind(tool_worker: Child, api: openai.AsyncOpenAI) -> None:
    import random

    schema = random_schema(random.Random(1))
    await api.chat.completions.create(**asked(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
    async with worker_client(tool_worker) as client:
        state = await until_idle(client)
    assert state["blocks"]["used"] == 0
