"""The promise itself, end to end on the real model: shared text is computed once, and requests find who holds it."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import aiohttp

from loadtests.demo_workload import QUESTIONS
from loadtests.local_stack import Child
from loadtests.streaming_client import TimedAnswer, timed_chat
from tests.support.stack_api import admin_workers, computed_positions

BLOCK_SIZE = 16
SYSTEM_PROMPT = (Path(__file__).parent.parent / "support" / "prompts" / "code_review_agent.md").read_text(
    encoding="utf-8"
)


async def ask(http: aiohttp.ClientSession, stack: Child, system: str, question: str) -> TimedAnswer:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 2, "temperature": 0}
    return await timed_chat(http, stack.url, body)


async def num_tokens(http: aiohttp.ClientSession, stack: Child, messages: list[dict[str, str]]) -> list[int]:
    body = {"model": "smollm2", "messages": messages, "add_generation_prompt": False}
    async with http.post(f"{stack.url}/tokenize", json=body) as response:
        assert response.status == 200, await response.text()
        return list((await response.json())["tokens"])


async def test_every_request_after_the_first_finds_the_shared_blocks_on_a_holder(
    http: aiohttp.ClientSession, stack: Child
) -> None:
    system = f"Review run {secrets.token_hex(4)}.\n{SYSTEM_PROMPT}"
    one = await num_tokens(http, stack, [{"role": "system", "content": system}, {"role": "user", "content": "A"}])
    two = await num_tokens(http, stack, [{"role": "system", "content": system}, {"role": "user", "content": "B"}])
    num_shared = next(index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    shared_blocks = num_shared // BLOCK_SIZE * BLOCK_SIZE
    assert shared_blocks > 1000
    holders: set[str | None] = set()
    for number, question in enumerate(QUESTIONS[:20]):
        answer = await ask(http, stack, system, question)
        unrelated = await ask(http, stack, f"Unrelated {secrets.token_hex(8)}", "Say yes.")
        assert unrelated.cached_tokens < BLOCK_SIZE * 2
        if number:
            assert answer.cached_tokens >= shared_blocks
            assert answer.worker_id in holders
        holders.add(answer.worker_id)


async def test_sixteen_twins_over_two_workers_compute_at_most_2_2_prompts(
    http: aiohttp.ClientSession, stack: Child
) -> None:
    urls = [str(worker["url"]) for worker in await admin_workers(http, stack)]
    seed = secrets.randbelow(20_000)
    prompt = [1000 + (seed + 7 * index) % 40_000 for index in range(2000)]
    before = await computed_positions(http, urls)

    async def one() -> int:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with http.post(f"{stack.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return int((await response.json())["usage"]["prompt_tokens"])

    counted = await asyncio.gather(*(one() for _ in range(16)))
    assert counted == [2000] * 16
    assert await computed_positions(http, urls) - before <= 2.2 * 2000
