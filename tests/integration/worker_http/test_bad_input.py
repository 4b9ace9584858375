"""A client's mistakes: the OpenAI error object with the right status and param, while the other streams go on."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_worker import MODEL_CONTEXT, WORKER_TOKEN, worker_client
from worker.prompt.renderer import COUNTED_MAX
from worker.protocol.internal_request import WORKER_TOKEN_HEADER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json", WORKER_TOKEN_HEADER: WORKER_TOKEN}


class Case(NamedTuple):
    name: str
    path: str
    body: bytes | dict[str, Any]
    status: int
    code: str
    param: str | None


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 2} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 2} | fields


JUNK = "a" * (COUNTED_MAX + 1)
LONG = [{"role": "user", "content": JUNK}]
CASES = [
    Case("malformed JSON", CHAT, b'{"model": "tiny", ', 400, "invalid_request", None),
    Case("empty body", CHAT, b"", 400, "invalid_request", None),
    Case("no object", CHAT, b"[1]", 400, "invalid_request", None),
    Case("duplicate key", CHAT, b'{"model":"tiny","model":"tiny","messages":[]}', 400, "invalid_request", "model"),
    Case("wrong type", CHAT, chat(max_tokens="many"), 400, "invalid_request", "max_tokens"),
    Case("unknown model", CHAT, chat(model="other"), 404, "model_not_found", "model"),
    Case("no model", COMPLETIONS, {"prompt": "x"}, 400, "invalid_request", "model"),
    Case("chat longer than the context", CHAT, chat(messages=[{"role": "user", "content": "x9" * MODEL_CONTEXT}]),
         400, "invalid_request", "messages"),
    Case("prompt longer than the context", COMPLETIONS, completion(prompt="x9" * MODEL_CONTEXT), 400,
         "invalid_request", "prompt"),
    Case("max_tokens beyond the context", COMPLETIONS, completion(max_tokens=MODEL_CONTEXT), 400, "invalid_request",
         "max_tokens"),
    Case("max_tokens 0", CHAT, chat(max_tokens=0), 400, "invalid_request", "max_tokens"),
    Case("max_tokens -1", COMPLETIONS, completion(max_tokens=-1), 400, "invalid_request", "max_tokens"),
    Case("a constraint of another engine", CHAT, chat(guided_json={"type": "object"}), 400, "invalid_request",
         "guided_json"),
    Case("stops that would not stop", COMPLETIONS, completion(stop_token_ids=[5]), 400, "invalid_request",
         "stop_token_ids"),
    Case("empty messages", CHAT, chat(messages=[]), 400, "invalid_request", "messages"),
    Case("empty prompt", COMPLETIONS, completion(prompt=""), 400, "invalid_request", "prompt"),
    Case("unknown role", CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "invalid_request",
         "messages[0].role"),
    Case("invalid UTF-8", CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', 400,
         "invalid_request", None),
    Case("NaN temperature", CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
         400, "invalid_request", "temperature"),
    Case("temperature out of range", CHAT, chat(temperature=9), 400, "invalid_request", "temperature"),
    Case("tools with a template that ignores them", CHAT,
         chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]), 400, "invalid_request",
         "tools"),
    Case("token id out of vocabulary", COMPLETIONS, completion(prompt=[1, 99_999]), 400, "invalid_request", "prompt"),
    Case("tokenize without text", "/tokenize", {"model": "tiny"}, 400, "invalid_request", "prompt"),
    Case("detokenize of a word", "/detokenize", {"tokens": ["a"]}, 400, "invalid_request", "tokens"),
    Case("abort without an id", "/abort", {}, 400, "invalid_request", "request_id"),
    Case("unknown path", "/v1/no/such/path", {}, 404, "not_found", None),
    Case("wrong method", "/v1/models", {}, 405, "method_not_allowed", None),
]


async def post(client: aiohttp.ClientSession, path: str, body: bytes | dict[str, Any],
               **headers: str) -> tuple[int, dict[str, Any], Any]:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with client.post(path, data=data, headers={**JSON, **headers}) as response:
        return response.status, await response.json(), response.headers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_mistake_is_named(client: aiohttp.ClientSession, case: Case, stream: bool) -> None:
    body = case.body if isinstance(case.body, bytes) else {**case.body, "stream": stream}
    status, answer, headers = await post(client, case.path, body)
    error = answer["error"]
    assert (status, error["code"]) == (case.status, case.code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if case.param is not None:
        assert str(error["param"]).startswith(case.param), error
    assert headers["x-request-id"]


async def test_other_streams_go_on(client: aiohttp.ClientSession) -> None:
    body = {**completion(max_tokens=600, temperature=0, ignore_eos=True), "stream": True}
    async with client.post(COMPLETIONS, json=body) as stream:
        await stream.content.readuntil(b"\n\n")
        answers = await asyncio.gather(*(post(client, case.path, case.body) for case in CASES))
        assert [status for status, _, _ in answers] == [case.status for case in CASES]
        rest = await stream.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("num_left", "expected"), [(1, 1), (15, 15), (16, 16), (40, 16)])
async def test_the_default_of_completions_shrinks_to_what_is_left(client: aiohttp.ClientSession, num_left: int,
                                                                  expected: int) -> None:
    prompt = {"prompt": [5] * (MODEL_CONTEXT - num_left), "ignore_eos": True, "temperature": 0}
    status, answer, _ = await post(client, COMPLETIONS, {"model": "tiny", **prompt})
    assert (status, answer["usage"]["completion_tokens"]) == (200, expected)
    status, answer, _ = await post(client, COMPLETIONS, completion(**prompt, max_tokens=num_left + 1))
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_numbers_of_the_context_are_told(client: aiohttp.ClientSession) -> None:
    _, answer, _ = await post(client, COMPLETIONS, completion(prompt=[5] * 2000))
    assert "2000" in answer["error"]["message"]
    assert str(MODEL_CONTEXT) in answer["error"]["message"]


@pytest.mark.parametrize(("path", "fields", "param"), [
    (CHAT, {"messages": [{"role": "user", "content": JUNK}]}, "messages"),
    (COMPLETIONS, {"prompt": JUNK}, "prompt"), (COMPLETIONS, {"prompt": ["hello", JUNK]}, "prompt"),
    ("/v1/embeddings", {"input": JUNK}, "input"), ("/v1/messages", {"messages": USER, "system": JUNK}, "messages"),
])
async def test_a_text_that_cannot_fit_is_not_tokenised(client: aiohttp.ClientSession, path: str, param: str,
                                                       fields: dict[str, Any]) -> None:
    status, answer, _ = await post(client, path, {"model": "tiny", "max_tokens": 2, **fields})
    assert status == 400
    assert answer["error"].get("param") == param
    assert "at least " in answer["error"]["message"]


@pytest.mark.parametrize(("path", "fields", "what"), [
    ("/tokenize", {"prompt": JUNK}, "characters"), ("/tokenize", {"messages": [*USER, *USER, *LONG]}, "characters"),
    ("/v1/messages/count_tokens", {"messages": LONG}, "characters"),
    ("/detokenize", {"tokens": [5] * (COUNTED_MAX + 1)}, "ids"),
])
async def test_what_is_only_counted_has_a_limit(client: aiohttp.ClientSession, path: str, fields: dict[str, Any],
                                                what: str) -> None:
    status, answer, _ = await post(client, path, {"model": "tiny", **fields})
    assert status == 400
    assert f"at most {COUNTED_MAX} {what}" in answer["error"]["message"]


async def test_a_body_of_100_mb_is_refused(worker: Child) -> None:
    async with worker_client(worker) as client:
        status, answer, _ = await post(client, CHAT, b"x" * 100_000_000)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_a_chunked_body_over_the_limit_is_refused(worker: Child) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 1_000_000

    async with worker_client(worker) as client, client.post(CHAT, data=chunks()) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"


async def test_a_client_request_id_is_echoed_and_a_bad_one_replaced(client: aiohttp.ClientSession) -> None:
    status, answer, headers = await post(client, COMPLETIONS, completion(), **{"x-request-id": "mine-1"})
    assert (status, answer["id"], headers["x-request-id"]) == (200, "cmpl-mine-1", "mine-1")
    _, _, headers = await post(client, COMPLETIONS, completion(), **{"x-request-id": "a b" + "c" * 200})
    assert " " not in headers["x-request-id"]
