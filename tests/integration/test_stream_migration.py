"""Streams whose worker is lost at any byte: what the client gets is the undisturbed stream, byte for byte."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.local_stack import Child
from tests.support.cutting_proxy import Cut, CuttingProxy, cutting_proxies
from tests.support.gateway_in_process import Answer, GatewayUnderTest, running_gateway
from tests.support.tiny_tokenizer import TOOL_TEMPLATE
from tests.support.tiny_worker import WORKER_TOKEN, running_tiny_worker, until_idle, worker_client, write_tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
PROMPTS = ["the quick brown fox", "hello world, this is"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"temperature": 0, "ignore_eos": True}),
    "seeded": (CHAT, {"temperature": 1.0, "ignore_eos": True}),
    "penalties": (COMPLETIONS, {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 1.0,
                                "repetition_penalty": 1.3, "ignore_eos": True, "logit_bias": {"40": 3}}),
    "logprobs": (COMPLETIONS, {"temperature": 1.0, "logprobs": 2, "ignore_eos": True}),
    "chat logprobs": (CHAT, {"temperature": 1.0, "logprobs": True, "top_logprobs": 2, "min_tokens": 20}),
    "grammar": (CHAT, {"temperature": 1.0, "response_format": SCHEMA, "max_tokens": 200}),
    "tool calls": (CHAT, {"temperature": 1.0, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}),
    "several choices": (CHAT, {"temperature": 1.0, "n": 3, "ignore_eos": True, "max_tokens": 12}),
    "several prompts with echo": (COMPLETIONS, {"temperature": 1.0, "n": 2, "echo": True, "prompt": PROMPTS,
                                                "ignore_eos": True, "max_tokens": 10}),
    "token ids asked for": (COMPLETIONS, {"temperature": 0, "return_token_ids": True, "ignore_eos": True}),
    "no usage": (CHAT, {"temperature": 0, "stream_options": None, "ignore_eos": True}),
}
LONG = ("grammar", "tool calls")    # each continuation compiles the grammar anew


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One strict worker behind two addresses: what the gateway takes for two is one answer to compare with."""
    model = write_tiny_model(Path(tmp_path_factory.mktemp("tiny-model")))
    template = model / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    with running_tiny_worker(model, "--chat-template", str(template), "--exactness", "strict") as child:
        yield child


@contextlib.asynccontextmanager
async def broken_ways(worker: Child, **settings: Any) -> AsyncIterator[tuple[GatewayUnderTest, list[CuttingProxy]]]:
    async with cutting_proxies(worker.url, worker.url) as proxies, running_gateway(
            *(proxy.url for proxy in proxies), worker_token=WORKER_TOKEN, **settings) as gateway:
        await gateway.until_exact(num_workers=2)
        yield gateway, proxies


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "the weather?"}]} if path == CHAT else {"prompt": PROMPTS[0]}
    return {"model": "tiny", "max_tokens": 30, "seed": 11, "stream": True, "stream_options": {"include_usage": True},
            **prompt, **fields}


async def stream(gateway: GatewayUnderTest, path: str, body: dict[str, Any], **headers: str) -> Answer:
    return await gateway.send("POST", path, payload=body, headers={"x-request-id": "same", **headers})


def by_choice(answer: Answer) -> dict[int | str, list[bytes]]:
    """The events of each choice in order, the usage and the end; without the time and what another cache held."""
    assert answer.status == 200, answer.body
    text = re.sub(rb'"created":\d+', b'"created":0', answer.body)
    text = re.sub(rb'"cached_tokens":\d+', b'"cached_tokens":0', text)
    *events, rest = text.split(b"\n\n")
    assert rest == b""
    found: dict[int | str, list[bytes]] = {}
    for event in events:
        index = re.search(rb'"index":(\d+),"(?:delta|text)"', event)
        found.setdefault(int(index[1]) if index else "end", []).append(event)
    return found


@pytest.mark.parametrize("name", CASES)
async def test_cut_at_any_byte_the_stream_is_the_undisturbed_one(worker: Child, name: str) -> None:
    await _cut_and_compare(worker, name, num_cuts=2 if name in LONG else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_cut_at_many_more_bytes(worker: Child, name: str) -> None:
    await _cut_and_compare(worker, name, num_cuts=40)


async def _cut_and_compare(worker: Child, name: str, *, num_cuts: int) -> None:
    path, fields = CASES[name]
    body = body_of(path, fields)
    rng = random.Random(f"{name}/{num_cuts}")
    async with broken_ways(worker) as (gateway, proxies):
        whole = await stream(gateway, path, body)
        num_bytes = len(whole.body)
        assert by_choice(whole)["end"][-1] == b"data: [DONE]"
        for _ in range(num_cuts):
            cut = rng.randrange(400, int(num_bytes * 1.2) + 500)
            for proxy in proxies:
                proxy.cuts = [Cut(cut)]
            answer = await stream(gateway, path, body)
            assert by_choice(answer) == by_choice(whole), f"cut after {cut} bytes"
            for proxy in proxies:
                proxy.cuts.clear()
        assert sum(proxy.num_cut for proxy in proxies) >= num_cuts / 2
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') > 0
        assert [(await gateway.worker(index))["inflight"] for index in range(2)] == [0, 0]
    async with worker_client(worker) as client:
        assert (await until_idle(client))["blocks"]["used"] == 0


MESSAGES = {"model": "tiny", "max_tokens": 200, "seed": 11, "stream": True, "temperature": 1.0,
            "messages": [{"role": "user", "content": "the weather?"}], "tool_choice": {"type": "any"},
            "tools": [{"name": "weather", "input_schema": CITY}]}
RESPONSES = {"model": "tiny", "max_output_tokens": 30, "seed": 11, "stream": True, "input": "the weather?",
             "ignore_eos": True}


@pytest.mark.parametrize(("path", "body"), [("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)])
async def test_translated_streams_move_too(worker: Child, path: str, body: dict[str, Any]) -> None:
    """The translation stands between the relay and the client, so that a seam in the chat stream is none there."""
    def told(answer: Answer) -> bytes:
        assert answer.status == 200, answer.body
        counts = rb'"(?:cached_tokens|input_tokens|cache_read_input_tokens|created_at|completed_at)":\d+'
        return re.sub(counts, b"", answer.body)

    async with broken_ways(worker) as (gateway, proxies):
        await stream(gateway, path, body)
        whole = await stream(gateway, path, body)
        for cut in (700, 1100):
            for proxy in proxies:
                proxy.cuts = [Cut(cut)]
            assert told(await stream(gateway, path, body)) == told(whole), f"cut after {cut} bytes"
            for proxy in proxies:
                proxy.cuts.clear()
        assert sum(proxy.num_cut for proxy in proxies)


async def test_lost_again_and_again_up_to_the_limit(worker: Child) -> None:
    body = body_of(CHAT, {"temperature": 1.0, "ignore_eos": True, "max_tokens": 60})
    async with broken_ways(worker, max_migrations=3, max_retries=3) as (gateway, proxies):
        whole = await stream(gateway, CHAT, body)
        script = [Cut(1500) for _ in range(3)]
        for proxy in proxies:
            proxy.cuts = script
        assert by_choice(await stream(gateway, CHAT, body)) == by_choice(whole)
        script += [Cut(1500) for _ in range(4)]
        over = await stream(gateway, CHAT, body)
        assert b"event: error" in over.body
        assert b"worker_failed" in over.body
        assert await gateway.metric('headstart_migrations_total{outcome="limit"}') == 1


async def test_who_does_not_want_to_move_gets_the_error(worker: Child) -> None:
    body = body_of(CHAT, {"temperature": 0, "ignore_eos": True})
    async with broken_ways(worker) as (gateway, proxies):
        for proxy in proxies:
            proxy.cuts = [Cut(1500)]
        answer = await stream(gateway, CHAT, body, **{"x-request-migration": "off"})
        assert b"event: error" in answer.body
        assert b"[DONE]" not in answer.body
        assert await gateway.metric('headstart_migrations_total{outcome="not_tried"}') == 1
        nonsense = await stream(gateway, CHAT, body, **{"x-request-migration": "maybe"})
        assert (nonsense.status, nonsense.error["param"]) == (400, "x-request-migration")


async def test_clients_never_see_the_comments_and_get_them_unbroken(worker: Child) -> None:
    """What passes is what the worker sends to somebody who asks it directly, but for the time."""
    body = body_of(CHAT, {"temperature": 1.0, "n": 2})
    async with broken_ways(worker) as (gateway, _), worker_client(worker) as client:
        through = await stream(gateway, CHAT, body)
        async with client.post(CHAT, json=body, headers={"x-request-id": "same"}) as response:
            direct = Answer(response.status, {}, await response.read())
        assert by_choice(through) == by_choice(direct)
        assert b": ids" not in through.body


async def test_an_answer_that_is_not_streamed_is_asked_for_again(worker: Child) -> None:
    body = {**body_of(CHAT, {"temperature": 1.0, "n": 2}), "stream": False, "stream_options": None}
    async with broken_ways(worker) as (gateway, proxies):
        whole = orjson.loads((await stream(gateway, CHAT, body)).body)
        for cut in (10, 400, 700):
            for proxy in proxies:
                proxy.cuts = []
            proxies[0].cuts = proxies[1].cuts = [Cut(cut)]
            again = orjson.loads((await stream(gateway, CHAT, body)).body)
            assert again["choices"] == whole["choices"]
        assert await gateway.metric('headstart_retries_total{reason="reset"}') >= 1


@pytest.mark.parametrize("how", ["silence", "half-close"])
async def test_silence_and_half_closed_sockets(worker: Child, how: str) -> None:
    body = body_of(CHAT, {"temperature": 1.0, "ignore_eos": True})
    async with broken_ways(worker, chunk_gap_timeout_s=0.5) as (gateway, proxies):
        whole = await stream(gateway, CHAT, body)
        proxies[0].cuts = proxies[1].cuts = [Cut(1700, how)]
        assert by_choice(await stream(gateway, CHAT, body)) == by_choice(whole)
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') == 1


@pytest.mark.parametrize(("path", "fields"), [
    ("/v1/messages", {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 40}),
    ("/v1/responses", {"input": "hello world", "max_output_tokens": 40}),
])
async def test_other_apis_move_too(worker: Child, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "temperature": 0, "stream": True, **fields}
    async with broken_ways(worker) as (gateway, proxies):
        whole = _without_counts(await stream(gateway, path, body))
        assert len(whole) > 3000, "long enough to be cut"
        for cut in (1200, 2500):
            for proxy in proxies:
                proxy.cuts = [Cut(cut)]
            assert _without_counts(await stream(gateway, path, body)) == whole
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') >= 2


def _without_counts(answer: Answer) -> bytes:
    assert answer.status == 200, answer.body
    return re.sub(rb'"(created_at|completed_at|cached_tokens|input_tokens|cache_read_input_tokens)":\d+', b"",
                  answer.body)
