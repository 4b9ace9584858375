"""The official client, unmodified, against a real worker process over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from loadtests.local_stack import Child

MESSAGES = [{"role": "system", "content": "you are a helpful assistant"},
            {"role": "user", "content": "hello, how is the weather today? ☀"}]
LONG = {"ignore_eos": True}


@pytest.fixture
async def api(worker: Child) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as api:
        yield api


async def test_models_name_the_context(api: openai.AsyncOpenAI) -> None:
    [model] = (await api.models.list()).data
    assert model.id == "tiny"
    assert (model.model_extra or {})["max_model_len"] == 1024
    assert (await api.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("other")


async def test_chat_streamed_equals_chat_whole(api: openai.AsyncOpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "extra_body": LONG}
    whole = await api.chat.completions.create(**asked)
    text, reasons, roles, usage = "", [], [], None
    async for chunk in await api.chat.completions.create(**asked, stream=True,
                                                         stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert (reasons, roles) == (["length"], ["assistant"])
    assert whole.usage is not None
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens) == (24, whole.usage.prompt_tokens)
    assert whole.system_fingerprint
    assert whole.system_fingerprint.startswith("fp_")


async def test_completion_streamed_equals_whole_for_two_prompts(api: openai.AsyncOpenAI) -> None:
    asked = {"model": "tiny", "prompt": ["the quick brown", "hello world"], "temperature": 0, "max_tokens": 8,
             "extra_body": LONG}
    whole = await api.completions.create(**asked)
    texts = {0: "", 1: ""}
    async for chunk in await api.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == [texts[0], texts[1]]


async def test_seed_decides_and_choices_differ(api: openai.AsyncOpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, "n": 2, "temperature": 1.0, "extra_body": LONG}
    first = await api.chat.completions.create(**asked, seed=7)
    again = await api.chat.completions.create(**asked, seed=7)
    other = await api.chat.completions.create(**asked, seed=8)
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1], "the two choices have randomness of their own"
    assert first.usage is not None
    assert first.usage.completion_tokens == 32


async def test_no_seed_gives_another_answer_each_time(api: openai.AsyncOpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 32, "temperature": 1.0, "extra_body": LONG}
    texts = {(await api.chat.completions.create(**asked)).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3


async def test_stop_cuts_the_text_and_the_bill(api: openai.AsyncOpenAI) -> None:
    asked = {"model": "tiny", "prompt": "the quick brown fox", "temperature": 0, "max_tokens": 40, "extra_body": LONG}
    free = (await api.completions.create(**asked)).choices[0].text
    stop = free[len(free) // 2:len(free) // 2 + 2]
    stopped = await api.completions.create(**asked, stop=stop)
    assert stopped.choices[0].text == free[:free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 40
    streamed = ""
    async for chunk in await api.completions.create(**asked, stop=stop, stream=True):
        streamed += "".join(choice.text for choice in chunk.choices)
    assert streamed == stopped.choices[0].text


async def test_chat_logprobs(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=6,
                                               logprobs=True, top_logprobs=3, extra_body=LONG)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 6
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs), "greedy takes the likeliest"
    raw = bytes(value for token in content for value in token.bytes or ())
    assert raw.decode("utf-8", "replace").startswith((answer.choices[0].message.content or "").rstrip("\ufffd"))


async def test_completion_logprobs(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(model="tiny", prompt="hello", temperature=0, max_tokens=5, logprobs=2,
                                          extra_body=LONG)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or ()) == len(logprobs.token_logprobs or ()) == len(logprobs.text_offset or ()) == 5
    assert all(len(top) == 2 for top in logprobs.top_logprobs or ())


async def test_token_ids_on_request(api: openai.AsyncOpenAI) -> None:
    extra = {**LONG, "return_token_ids": True}
    asked = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 5}
    whole = await api.completions.create(**asked, extra_body=extra)
    token_ids = (whole.choices[0].model_extra or {})["token_ids"]
    assert len(token_ids) == 5
    streamed: list[int] = []
    async for chunk in await api.completions.create(**asked, extra_body=extra, stream=True):
        for choice in chunk.choices:
            streamed += (choice.model_extra or {})["token_ids"]
    assert streamed == token_ids


async def test_second_identical_prompt_is_served_from_cache(api: openai.AsyncOpenAI) -> None:
    prompt = "this prompt is long enough to fill a few blocks of sixteen tokens; it appears in no other test"
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 4, "extra_body": LONG}
    cold, warm = await api.completions.create(**asked), await api.completions.create(**asked)
    assert cold.usage is not None
    assert warm.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert warm.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    full_blocks = cold.usage.prompt_tokens // 16 * 16
    assert warm.usage.prompt_tokens_details.cached_tokens == min(full_blocks, cold.usage.prompt_tokens - 1) > 0
    assert cold.choices[0].text == warm.choices[0].text


async def test_salted_prompts_share_nothing(api: openai.AsyncOpenAI) -> None:
    prompt = "another prompt that is long enough to fill a few blocks and that is sent with a salt of its own"

    async def cached(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt else {}
        answer = await api.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [await cached(salt) for salt in (None, "a", "b")] == [0, 0, 0]
    assert await cached("a") > 0
