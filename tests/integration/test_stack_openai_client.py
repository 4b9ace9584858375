"""The official `openai` client, unmodified, through the gateway on the real model."""

from __future__ import annotations

import openai
import pytest

from loadtests.local_stack import Child

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(stack: Child) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_chat_twice_is_equal_and_warm(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You answer in one word. " * 12}, *MESSAGES]
    first = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=8)
    second = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=8)
    assert first.choices[0].message.content
    assert second.choices[0].finish_reason in ("length", "stop")
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


def test_chat_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=12, seed=7, temperature=0.8)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        max_tokens=12,
        seed=7,
        temperature=0.8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"


def test_n_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=8, n=2, seed=1, temperature=1.0
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_completions_stop_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="1, 2, 3, 4,", max_tokens=16, temperature=0, stop=[" 7"], logprobs=2
    )
    choice = answer.choices[0]
    assert " 7" not in choice.text
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) > 0
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in content)


def test_completions_streamed_with_seed(client: openai.OpenAI) -> None:
    def text() -> str:
        stream = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=10, seed=3, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    assert text() == text() != ""


def test_a_clients_mistake_is_a_400_with_its_param(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=[], max_tokens=4)
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)
