"""echo, best_of and n of plain completions."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.tiny_worker import until_idle

PROMPT = "the quick brown fox <|im_end|> ☀"


@pytest.fixture
async def api(worker: Child) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "temperature": 1.0, "seed": 4, "max_tokens": 12,
            "extra_body": {"ignore_eos": True}, **fields}


async def test_echo_begins_with_the_prompt(api: openai.AsyncOpenAI) -> None:
    ids = tiny_tokenizer().encode(PROMPT, add_special_tokens=False).ids
    for prompts, starts in (([PROMPT, "hello"], [PROMPT, "hello"]), ([ids], [PROMPT])):
        plain = await api.completions.create(**asked(prompt=prompts, n=2))
        echoed = await api.completions.create(**asked(prompt=prompts, n=2, echo=True))
        expected = [starts[index // 2] + choice.text for index, choice in enumerate(plain.choices)]
        assert [choice.text for choice in echoed.choices] == expected
        assert echoed.usage is not None
        assert plain.usage is not None
        assert echoed.usage.completion_tokens == plain.usage.completion_tokens
        streamed = [""] * len(expected)
        async for chunk in await api.completions.create(**asked(prompt=prompts, n=2, echo=True), stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == expected


async def test_best_of_is_the_likeliest_of_what_n_would_give(api: openai.AsyncOpenAI) -> None:
    prompts = [PROMPT, "hello world"]
    every = await api.completions.create(**asked(prompt=prompts, n=5, logprobs=0))

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = [choice.text for start in (0, 5)
                for choice in sorted(every.choices[start:start + 5], key=likelihood, reverse=True)[:2]]
    best = await api.completions.create(**asked(prompt=prompts, n=2, best_of=5))
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None
    assert best.usage.completion_tokens == 2 * 5 * 12, "every candidate was generated"


async def test_four_choices_compute_the_prompt_once(client: aiohttp.ClientSession) -> None:
    num_prompt, num_new = 197, 6
    prompt = random.Random(77).choices(range(3, 300), k=num_prompt)
    before = (await until_idle(client))["computed_positions_total"]
    async with client.post("/v1/completions", json={
            "model": "tiny", "prompt": prompt, "n": 4, "max_tokens": num_new, "temperature": 1, "ignore_eos": True,
            "seed": 5}) as response:
        answer = await response.json()
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    computed = (await until_idle(client))["computed_positions_total"] - before
    # The last block of the prompt is not full, so that each choice fills one of its own.
    assert computed <= num_prompt + 3 * (num_prompt % 16) + 4 * (num_new - 1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
