"""A worker whose weights are in 8 bits, as a user starts it: it says so, answers, and hits its own cache alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_worker import WORKER_TOKEN, get_json, running_tiny_worker, worker_client
from worker.model.linear import multiplies_bf16
from worker.protocol.cache_events import SnapshotReader

pytest.importorskip("numba")
PROMPT = "the quick brown fox jumps over the lazy dog and the cat sat on the mat " * 3


def takes_int8() -> bool:
    if not multiplies_bf16(torch.device("cpu")):
        return False
    from worker.model.compiled.int8_machine import MULTIPLIES_INT8

    return MULTIPLIES_INT8


@pytest.fixture(scope="module")
def model() -> Path:
    """Just large enough to be decoded in compiled code."""
    return write_tiny_model("int8-worker", "LlamaConfig", {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 8})


async def ask(url: str) -> int:
    """How many of the prompt's tokens were cached."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    assert answer["usage"]["completion_tokens"] == 8
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def hashes_of(client: aiohttp.ClientSession) -> set[int]:
    async with client.get("/kv/snapshot", headers={"x-headstart-worker-token": WORKER_TOKEN}) as response:
        assert response.status == 200
        reader = SnapshotReader()
        blocks = reader.feed(await response.read())
        reader.close()
    return {block_hash for stored in blocks for block_hash in stored.block_hashes}


@pytest.mark.skipif(not takes_int8(), reason="this CPU reads no weights in 8 bits")
async def test_it_says_so_and_shares_blocks_with_nobody_of_another_kind(model: Path) -> None:
    with running_tiny_worker(model, "--weight-dtype", "int8") as narrow, running_tiny_worker(model) as plain:
        states = []
        for worker, kind in ((narrow, "int8"), (plain, "bfloat16")):
            async with worker_client(worker) as client:
                assert (await get_json(client, "/v1/models"))["data"][0]["weight_dtype"] == kind
                states.append(state := await get_json(client, "/kv"))
                assert state["weight_dtype"] == kind
        assert states[0]["hash_scheme_digest"] != states[1]["hash_scheme_digest"]
        assert await ask(narrow.url) == 0
        assert await ask(narrow.url) > 0
        assert await ask(plain.url) == 0
        async with worker_client(narrow) as client, worker_client(plain) as other:
            held, others = await hashes_of(client), await hashes_of(other)
        assert held
        assert others
        assert not held & others
