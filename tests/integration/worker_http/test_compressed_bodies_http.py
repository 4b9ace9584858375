"""Compressed bodies at a worker: read, refused, and never inflated where nobody asked."""

from __future__ import annotations

import gzip
import zlib

import aiohttp
import orjson
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_worker import running_tiny_worker

BODY = orjson.dumps({"model": "tiny", "prompt": "hello"})
MIB = 1 << 20


@pytest.mark.parametrize(("coding", "data"), [("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY))])
async def test_they_are_read(client: aiohttp.ClientSession, worker: Child, coding: str, data: bytes) -> None:
    url, headers = f"{worker.url}/tokenize", {"Content-Encoding": coding}
    async with client.post(url, data=data, headers=headers) as packed, client.post(url, data=BODY) as plain:
        assert (packed.status, await packed.read()) == (200, await plain.read())


@pytest.mark.parametrize(("coding", "status", "code"), [
    ("gzip", 400, "invalid_request"), ("deflate", 400, "invalid_request"), ("br", 415, "encoding_not_supported")])
async def test_what_cannot_be_read_is_refused(client: aiohttp.ClientSession, worker: Child, coding: str, status: int,
                                              code: str) -> None:
    async with client.post(f"{worker.url}/v1/completions", data=BODY, headers={"Content-Encoding": coding}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)


async def test_a_body_that_nobody_reads_is_not_looked_into(client: aiohttp.ClientSession, worker: Child) -> None:
    """aiohttp drops what is left of a body; were it inflated for that, this one would be a mistake."""
    async with client.post(f"{worker.url}/nowhere", data=b"no gzip", headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 404


async def test_a_bomb_is_refused_at_the_limit(tiny_model: object) -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    with running_tiny_worker(tiny_model, "--max-body-bytes", str(MIB)) as worker:  # type: ignore[arg-type]
        async with aiohttp.ClientSession() as session:
            for path in ("/v1/completions", "/tokenize"):
                async with session.post(worker.url + path, data=bomb, headers={"Content-Encoding": "gzip"}) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")
