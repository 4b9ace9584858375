"""POST /kv/prewarm: the blocks are there afterwards, under the salt given, and only for who has the token."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.support.tiny_worker import WORKER_TOKEN
from worker.protocol.internal_request import WORKER_TOKEN_HEADER, encode_internal

TOKEN = {WORKER_TOKEN_HEADER: WORKER_TOKEN}


async def prewarm(client: aiohttp.ClientSession, body: Any, headers: dict[str, str] = TOKEN) -> tuple[int, Any]:
    async with client.post("/kv/prewarm", json=body, headers=headers) as response:
        return response.status, await response.json()


async def cached(client: aiohttp.ClientSession, token_ids: list[int], salt: bytes | None) -> int:
    headers, body = encode_internal(b'{"model":"tiny","prompt":[1],"max_tokens":1}', [token_ids], salt=salt)
    async with client.post("/v1/completions", data=body, headers={**headers, **TOKEN}) as response:
        assert response.status == 200
        return int(response.headers["x-headstart-cached-tokens"])


@pytest.mark.parametrize("salt", [None, b"a tenant's"])
async def test_what_was_prewarmed_is_found_and_by_nobody_else(client: aiohttp.ClientSession,
                                                               salt: bytes | None) -> None:
    ids = [3 + (7 * index + (0 if salt is None else 1)) % 90 for index in range(64)]
    body = {"token_ids": ids, "salt": None if salt is None else salt.hex()}
    assert await prewarm(client, body) == (200, {"token_ids": 64, "cached_tokens": 0})
    status, again = await prewarm(client, body)
    assert (status, again["cached_tokens"]) == (200, 63)
    assert await cached(client, [*ids, 5, 6], b"another's") == 0
    assert await cached(client, [*ids, 5, 6], salt) == 64


async def test_only_with_the_worker_token(client: aiohttp.ClientSession) -> None:
    for headers in ({}, {WORKER_TOKEN_HEADER: "wrong"}):
        status, answer = await prewarm(client, {"token_ids": [1]}, headers)
        assert (status, answer["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(("body", "param"), [
    ({"token_ids": []}, "token_ids"), ({}, "token_ids"), ({"token_ids": [-1]}, "token_ids"),
    ({"token_ids": ["1"]}, "token_ids"), ({"token_ids": [10**9]}, "token_ids"),
    ({"token_ids": [1] * 10_000}, "token_ids"),
    ({"token_ids": [1], "salt": "xyz"}, "salt"), ({"token_ids": [1], "salt": ""}, "salt"),
    ({"token_ids": [1], "salt_from": -1}, "salt_from")])
async def test_a_mistake_is_named(client: aiohttp.ClientSession, body: dict[str, Any], param: str) -> None:
    status, answer = await prewarm(client, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert answer["error"]["param"].split(".")[0].split("[")[0] == param
