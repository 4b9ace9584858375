"""A request preempted on purpose tells so in the log: who needed room, whose blocks went, what is computed again."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import aiohttp
import orjson

from loadtests.local_stack import running_worker

BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4  # SmolLM2 in float32
POOL_TOKENS = 640
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 120


async def test_a_preempted_request_finishes_and_both_lines_are_logged(http: aiohttp.ClientSession) -> None:
    memory = ["--kv-memory", f"{POOL_TOKENS * KV_BYTES_PER_TOKEN}", "--kv-dtype", "float32", "--exactness", "strict"]
    with running_worker(model="smollm2", arguments=memory) as worker:

        async def one(number: int) -> dict[str, Any]:
            start = secrets.randbelow(10_000)
            prompt = [1000 + start + number * 7000 + 3 * index for index in range(PROMPT_TOKENS)]
            body = {
                "model": "smollm2",
                "prompt": prompt,
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with http.post(f"{worker.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return dict(await response.json())

        # Two prompts of 256 fit in 640 tokens; two sequences of 376 do not: one has to give way and come back.
        answers = await asyncio.gather(one(0), one(1))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [OUTPUT_TOKENS] * 2
        lines = [orjson.loads(line) for line in worker.log_tail(200_000).splitlines() if line.startswith("{")]
    preempted = [line for line in lines if "preempt" in str(line.get("event"))]
    finished = [line for line in lines if line.get("preemptions")]
    assert preempted, "no line says that a sequence was preempted"
    assert preempted[0]["recompute_tokens"] > 0
    assert all(line["for_request_id"] and line["request_id"] for line in preempted)
    assert finished, "no finished request says that it was preempted"
    assert finished[0]["recomputed_tokens"] > 0
