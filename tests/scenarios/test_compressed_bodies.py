"""Request bodies with gzip and deflate: read under the same limit as others, and never passed on as they came."""

from __future__ import annotations

import gzip
import zlib

import orjson
import pytest

from tests.support.gateway_in_process import WORKER_TOKEN, running_gateway
from tests.support.stub_worker import StubWorker, running

BODY = orjson.dumps({"model": "stub", "prompt": "hello"})
LIMIT_BYTES = 1024 * 1024
RSS_MAX_BYTES = 64 * 1024 * 1024


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(("coding", "data"), [
    ("gzip", gzip.compress(BODY, mtime=0)), ("GZIP", gzip.compress(BODY, mtime=0)), ("deflate", zlib.compress(BODY)),
    ("identity", BODY)])
async def test_a_compressed_body_is_served_and_its_worker_gets_the_plain_one(coding: str, data: bytes) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        answer = await gateway.send("POST", "/v1/completions", headers={"Content-Encoding": coding}, body=data)
        assert answer.status == 200
        assert stub.seen[0].body.startswith(BODY)
        assert "content-encoding" not in stub.seen[0].headers


@pytest.mark.parametrize("num_bytes", [LIMIT_BYTES + 1, 1024 * LIMIT_BYTES])
async def test_a_bomb_is_refused_when_it_has_grown_to_the_limit(num_bytes: int) -> None:
    """A thousandth of its size travels; what it grows to is counted, and it stops there."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(squeeze.compress(b" " * min(LIMIT_BYTES, num_bytes - at))
                    for at in range(0, num_bytes, LIMIT_BYTES)) + squeeze.flush()
    async with running_gateway("http://127.0.0.1:1", max_body_bytes=LIMIT_BYTES) as gateway:
        before = rss_bytes()
        answer = await gateway.send("POST", "/v1/completions", headers={"Content-Encoding": "gzip"}, body=bomb)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert rss_bytes() - before < RSS_MAX_BYTES
        assert (await gateway.send("GET", "/livez")).status == 200


@pytest.mark.parametrize("coding", ["gzip, gzip", "compress", "x", "br", "zstd"])
async def test_another_coding_is_refused(coding: str) -> None:
    async with running_gateway("http://127.0.0.1:1") as gateway:
        answer = await gateway.send("POST", "/v1/completions", headers={"Content-Encoding": coding}, body=BODY)
        assert (answer.status, answer.error["code"]) == (415, "encoding_not_supported")


async def test_a_body_that_nobody_reads_is_not_looked_into() -> None:
    """aiohttp drops what is left of a body; were it inflated for that, this one would be a mistake."""
    async with running_gateway("http://127.0.0.1:1") as gateway:
        answer = await gateway.send("POST", "/nowhere", headers={"Content-Encoding": "gzip"}, body=b"no gzip")
        assert answer.status == 404
