"""The gateway's way in: prompt ids in the body, a salt in the headers, and the worker's token or a 403."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.tiny_worker import WORKER_TOKEN, get_json
from worker.protocol.internal_request import (
    CACHED_TOKENS_HEADER,
    PROMPT_LENGTHS_HEADER,
    RESUME_HEADER,
    WORKER_TOKEN_HEADER,
    encode_internal,
)

COMPLETIONS = "/v1/completions"
TOKEN = {WORKER_TOKEN_HEADER: WORKER_TOKEN}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "the body's own text, which nobody reads", "max_tokens": 6, "temperature": 0,
            "ignore_eos": True} | fields


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


async def send(client: aiohttp.ClientSession, path: str, json_body: dict[str, Any], prompts: list[list[int]],
               extra: dict[str, str], **salt: Any) -> tuple[int, dict[str, Any], Any]:
    headers, data = encode_internal(orjson.dumps(json_body), prompts, **salt)
    async with client.post(path, data=data, headers=headers | extra) as response:
        return response.status, await response.json(), response.headers


@pytest.mark.parametrize("extra", [{}, {WORKER_TOKEN_HEADER: ""}, {WORKER_TOKEN_HEADER: "wrong"},
                                   {WORKER_TOKEN_HEADER: WORKER_TOKEN + "x"}],
                         ids=["none", "empty", "wrong", "longer"])
async def test_without_the_token_it_is_forbidden(client: aiohttp.ClientSession, extra: dict[str, str]) -> None:
    status, answer, _ = await send(client, COMPLETIONS, body(), [ids("hello")], extra)
    assert (status, answer["error"]["code"]) == (403, "forbidden")


async def test_ids_in_the_body_are_what_is_completed(client: aiohttp.ClientSession) -> None:
    text = "the quick brown fox"
    status, internal, headers = await send(client, COMPLETIONS, body(), [ids(text)], TOKEN)
    assert status == 200, internal
    async with client.post(COMPLETIONS, json=body(prompt=text)) as response:
        direct = await response.json()
    assert internal["choices"][0]["text"] == direct["choices"][0]["text"]
    assert internal["usage"]["prompt_tokens"] == len(ids(text))
    assert headers[CACHED_TOKENS_HEADER] == str(internal["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_chat_is_not_rendered_again(client: aiohttp.ClientSession) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "unused"}], "max_tokens": 4, "temperature": 0}
    status, answer, _ = await send(client, "/v1/chat/completions", chat, [ids("hello world")], TOKEN)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == len(ids("hello world"))


async def test_a_stream_names_its_hit_before_the_first_byte(client: aiohttp.ClientSession) -> None:
    prompt = ids("a prompt of the internal route that is long enough to fill at least two blocks of tokens")
    await send(client, COMPLETIONS, body(), [prompt], TOKEN)
    headers, data = encode_internal(orjson.dumps(body(stream=True)), [prompt])
    async with client.post(COMPLETIONS, data=data, headers=headers | TOKEN) as response:
        assert int(response.headers[CACHED_TOKENS_HEADER]) == min(len(prompt) // 16 * 16, len(prompt) - 1) > 0
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_gateway_salt_isolates_from_where_it_starts(client: aiohttp.ClientSession) -> None:
    prompt = ids("a salted prompt whose first block is public and whose other blocks belong to one tenant alone, so")
    assert len(prompt) > 48

    async def cached(**salt: Any) -> int:
        status, answer, _ = await send(client, COMPLETIONS, body(), [prompt], TOKEN, **salt)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached(salt=b"one", salt_from=16) == 0
    assert await cached(salt=b"two", salt_from=16) == 16, "the public block is shared"
    assert await cached(salt=b"two", salt_from=0) == 0
    assert await cached(salt=b"two", salt_from=16) > 16


async def test_a_body_salt_never_meets_a_gateway_salt(client: aiohttp.ClientSession) -> None:
    text = "a prompt sent once with a salt of the gateway and once with the same bytes as a salt of the body"
    await send(client, COMPLETIONS, body(), [ids(text)], TOKEN, salt=b"same")
    async with client.post(COMPLETIONS, json=body(prompt=text, cache_salt="same")) as response:
        assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


RESUME = {"generated": 1, "choice": 0, "sent_chars": 0, "id": "cmpl-1", "created": 1}


@pytest.mark.parametrize(("changes", "fields"), [
    ({"generated": -1}, {}), ({"generated": 0, "sent_chars": 1}, {}), ({"generated": 2}, {}),
    ({"generated": "1"}, {}), ({"sent_chars": 50}, {}), ({"id": ""}, {}), ({"choice": -1}, {}),
    ({}, {"stream": False}), ({}, {"max_tokens": 1}), ({}, {"stop": "b"})])
async def test_a_resumption_that_makes_no_sense(client: aiohttp.ClientSession, changes: dict[str, Any],
                                                fields: dict[str, Any]) -> None:
    header = orjson.dumps(RESUME | changes).decode()
    status, answer, _ = await send(client, COMPLETIONS, body(**{"stream": True, **fields}), [[*ids("a"), *ids("b")]],
                                   {**TOKEN, RESUME_HEADER: header})
    assert (status, answer["error"]["param"]) == (400, RESUME_HEADER)


async def test_lengths_that_do_not_fit_the_body(client: aiohttp.ClientSession) -> None:
    status, answer, _ = await send(client, COMPLETIONS, body(), [ids("x")], {**TOKEN, PROMPT_LENGTHS_HEADER: "7"})
    assert (status, answer["error"]["param"]) == (400, PROMPT_LENGTHS_HEADER)


async def test_ids_out_of_the_vocabulary(client: aiohttp.ClientSession) -> None:
    status, answer, _ = await send(client, COMPLETIONS, body(), [[1, 2**32 - 1]], TOKEN)
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_the_seed_of_the_hash_scheme_is_for_token_holders(client: aiohttp.ClientSession) -> None:
    assert "seed" not in (await get_json(client, "/kv"))["hash_scheme"]
    async with client.get("/kv", headers=TOKEN) as response:
        assert "seed" in (await response.json())["hash_scheme"]
