"""echo and best_of of plain completions, through the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_tokenizer import tiny_tokenizer

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
