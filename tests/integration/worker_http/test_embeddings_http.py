"""Embeddings by the official client, at a worker and through a gateway."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from loadtests.local_stack import Child
from tests.support.gateway_in_process import running_gateway
from tests.support.tiny_worker import WORKER_TOKEN

TEXTS = ["the quick brown fox jumps over the lazy dog", "hello", "hello world"]


async def embedded(url: str, inputs: Any, **more: Any) -> tuple[list[list[float]], int]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(**{"model": "tiny", "input": inputs, **more})
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data], answer.usage.prompt_tokens


async def test_embeddings_by_both_ways_and_in_both_encodings(worker: Child) -> None:
    vectors, num_tokens = await embedded(worker.url, TEXTS)  # the client asks for base64 by itself
    plain, _ = await embedded(worker.url, TEXTS, encoding_format="float")
    for one, other in zip(vectors, plain, strict=True):
        assert math.isclose(math.hypot(*other), 1, abs_tol=1e-6)
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6
    alone, _ = await embedded(worker.url, TEXTS[1])
    assert max(abs(a - b) for a, b in zip(alone[0], plain[1], strict=True)) < 1e-4
    async with running_gateway(worker.url, worker_token=WORKER_TOKEN) as gateway:
        await gateway.until_exact()
        through, same_tokens = await embedded(gateway.url, TEXTS)
        assert same_tokens == num_tokens > len(TEXTS)
        assert max(abs(a - b) for a, b in zip(through[0], plain[0], strict=True)) < 1e-4
        for fields, param in (({"input": []}, "input"), ({"input": "x", "dimensions": 3}, "dimensions"),
                              ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
                              ({"input": ["x", 5]}, "input[1]"), ({"input": "x y " * 2000}, "input"),
                              ({"input": ""}, "input"), ({"input": [[5], [10**6]]}, "input[1]")):
            answer = await gateway.send("POST", "/v1/embeddings", payload={"model": "tiny", **fields})
            assert (answer.status, answer.error["param"]) == (400, param), fields
        with pytest.raises(openai.NotFoundError):
            await embedded(gateway.url, "x", model="another")
