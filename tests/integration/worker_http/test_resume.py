"""A generation that moves to another worker: from the cut on, the stream is the undisturbed one, chunk for chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.tiny_worker import WORKER_TOKEN, until_idle, worker_client
from worker.protocol.internal_request import WORKER_TOKEN_HEADER, Resume, encode_internal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = list(tiny_tokenizer().encode("the quick brown fox and the weather in Rome", add_special_tokens=False).ids)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.fixture
async def client(tool_worker: Child) -> AsyncIterator[aiohttp.ClientSession]:
    async with worker_client(tool_worker) as session:
        yield session


async def stream(client: aiohttp.ClientSession, path: str, body: dict[str, Any], prompt: list[int],
                 resume: Resume | None = None) -> list[dict[str, Any]]:
    headers, data = encode_internal(orjson.dumps(body), [prompt], resume=resume)
    async with client.post(path, data=data, headers={**headers, WORKER_TOKEN_HEADER: WORKER_TOKEN}) as response:
        raw = await response.read()
        assert response.status == 200, raw
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "unused"}]} if path == CHAT else {"prompt": "unused"}
    return {"model": "tiny", "max_tokens": 40, "seed": 11, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}, **prompt, **fields}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def resume_after(chunks: list[dict[str, Any]]) -> tuple[list[int], Resume]:
    choices = [chunk["choices"][0] for chunk in chunks]
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    sent = sum(len(text_of(choice)) for choice in choices)
    return token_ids, Resume(generated=len(token_ids), choice=choices[0]["index"], sent_chars=sent,
                             id=chunks[0]["id"], created=chunks[0]["created"])


def without_cached(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Another worker may hold more or less of the prompt."""
    return [{**chunk, "usage": {**chunk["usage"], "prompt_tokens_details": None}} if chunk.get("usage") else chunk
            for chunk in chunks]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"temperature": 0, "ignore_eos": True}),
    "seeded": (CHAT, {"temperature": 1.0, "ignore_eos": True}),
    "penalties": (COMPLETIONS, {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 1.0,
                                "repetition_penalty": 1.3, "ignore_eos": True, "logit_bias": {"40": 3}}),
    "logprobs": (COMPLETIONS, {"temperature": 1.0, "logprobs": 2, "ignore_eos": True}),
    "chat logprobs": (CHAT, {"temperature": 1.0, "logprobs": True, "top_logprobs": 2, "min_tokens": 30}),
    "grammar": (CHAT, {"temperature": 1.0, "response_format": SCHEMA, "max_tokens": 200}),
    "tool calls": (CHAT, {"temperature": 1.0, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}),
}


@pytest.mark.parametrize("name", CASES)
async def test_from_any_cut_on_the_stream_is_the_same(client: aiohttp.ClientSession, name: str) -> None:
    path, fields = CASES[name]
    body = body_of(path, **fields)
    whole = await stream(client, path, body, PROMPT)
    last = len(whole) - 2    # behind it come the last choice chunk and the usage
    first = 2 if path == CHAT else 1
    for cut in sorted({first, first + 1, last // 3, last // 2, last}):
        token_ids, resume = resume_after(whole[:cut])
        resumed = await stream(client, path, body, [*PROMPT, *token_ids], resume)
        assert without_cached(resumed) == without_cached(whole[cut:]), f"cut after {cut} chunks"
    state = await until_idle(client)
    assert state["blocks"]["used"] == 0


async def test_stops_across_the_cut(client: aiohttp.ClientSession) -> None:
    free = await stream(client, COMPLETIONS, body_of(COMPLETIONS, temperature=0, ignore_eos=True), PROMPT)
    text = "".join(text_of(chunk["choices"][0]) for chunk in free[:-1])
    middle = len(text) // 2
    body = body_of(COMPLETIONS, temperature=0, ignore_eos=True, stop=[text[middle:middle + 5]])
    whole = await stream(client, COMPLETIONS, body, PROMPT)
    assert whole[-2]["choices"][0]["finish_reason"] == "stop"
    for cut in range(1, len(whole) - 1):
        token_ids, resume = resume_after(whole[:cut])
        resumed = await stream(client, COMPLETIONS, body, [*PROMPT, *token_ids], resume)
        assert without_cached(resumed) == without_cached(whole[cut:]), f"cut after {cut} chunks"


async def test_one_choice_of_several_keeps_its_number_and_its_randomness(client: aiohttp.ClientSession) -> None:
    body = body_of(CHAT, temperature=1.0, n=3, ignore_eos=True, max_tokens=12)
    whole = await stream(client, CHAT, body, PROMPT)
    for choice in range(3):
        chunks = [chunk for chunk in whole[:-1] if chunk["choices"][0]["index"] == choice]
        token_ids, resume = resume_after(chunks[:6])
        resumed = await stream(client, CHAT, body, [*PROMPT, *token_ids], resume)
        assert resumed[:-1] == chunks[6:]


async def test_text_that_was_not_sent_yet_comes_first(client: aiohttp.ClientSession) -> None:
    body = body_of(COMPLETIONS, temperature=0, ignore_eos=True)
    whole = await stream(client, COMPLETIONS, body, PROMPT)
    token_ids, resume = resume_after(whole[:10])
    resume = Resume(generated=resume.generated, choice=0, sent_chars=resume.sent_chars - 3, id="cmpl-x", created=7)
    resumed = await stream(client, COMPLETIONS, body, [*PROMPT, *token_ids], resume)
    text = "".join(text_of(chunk["choices"][0]) for chunk in whole[:-1])
    assert "".join(text_of(chunk["choices"][0]) for chunk in resumed[:-1]) == text[resume.sent_chars:]
    assert {(chunk["id"], chunk["created"]) for chunk in resumed} == {("cmpl-x", 7)}
