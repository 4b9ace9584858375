"""`echo` with `logprobs`, and `prompt_logprobs`, as clients ask for them."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from loadtests.local_stack import Child

TEXT = "the quick brown fox jumps over the lazy dog"


async def post(client: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json={"model": "tiny", "max_tokens": 3, "temperature": 0, **body}) as response:
        return response.status, await response.json()


async def test_echo_with_logprobs_covers_prompt_and_answer_cold_and_warm(worker: Child) -> None:
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as api:
        answers = [await api.completions.create(model="tiny", prompt=[TEXT, "hello"], max_tokens=3, temperature=0,
                                                echo=True, logprobs=2, n=2) for _ in range(2)]
        plain = await api.completions.create(model="tiny", prompt=TEXT, max_tokens=3, temperature=0, logprobs=2)
    for answer in answers:
        assert len(answer.choices) == 4
        for index, choice in enumerate(answer.choices):
            text = (TEXT, "hello")[index // 2]
            logprobs = choice.logprobs
            assert logprobs is not None
            assert choice.text.startswith(text)
            assert logprobs.tokens is not None
            assert logprobs.token_logprobs is not None
            assert logprobs.text_offset is not None
            assert logprobs.top_logprobs is not None
            assert "".join(logprobs.tokens).startswith(text)
            assert logprobs.token_logprobs[0] is None
            assert all(value <= 0 for value in logprobs.token_logprobs[1:])
            assert all(choice.text[start:].startswith(token) for start, token in
                       zip(logprobs.text_offset, logprobs.tokens, strict=True) if not token.startswith("bytes:"))
            assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    first, second = (answer.choices[0].logprobs for answer in answers)
    assert first == second
    assert plain.choices[0].logprobs is not None
    assert first is not None
    assert first.tokens is not None
    assert first.tokens[-3:] == plain.choices[0].logprobs.tokens


async def test_prompt_logprobs_as_vllm_answers_them(client: aiohttp.ClientSession) -> None:
    status, answer = await post(client, "/v1/completions", prompt=TEXT, prompt_logprobs=1)
    assert status == 200
    shown = answer["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    assert len(shown) == answer["usage"]["prompt_tokens"]
    for item in shown[1:]:
        assert 1 <= len(item) <= 2
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(item.values())))
        assert min(entry["rank"] for entry in item.values()) == 1
    status, answer = await post(client, "/v1/chat/completions", messages=[{"role": "user", "content": TEXT}],
                                prompt_logprobs=0)
    assert status == 200
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(item) == 1 for item in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"echo": True, "logprobs": 21}, "logprobs")])
async def test_what_cannot_be_had_is_refused(client: aiohttp.ClientSession, body: dict[str, Any], param: str) -> None:
    status, answer = await post(client, "/v1/completions", prompt="x", **body)
    assert (status, answer["error"]["param"]) == (400, param)
