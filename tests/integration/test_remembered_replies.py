"""A second turn that repeats the first answer hits through that answer, however the model spelled it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.local_stack import Child, running_worker
from tests.support.gateway_in_process import GatewayUnderTest, running_gateway
from tests.support.npm_tokenizers import npm_tokenizer
from tests.support.tiny_worker import WORKER_TOKEN

BLOCK_SIZE = 16
REPLY_TOKENS = 48
QUESTION = "Name three rivers of Europe, and say where each of them rises and ends."
MODELS = ("smollm2", "qwen3")
PATIENCE = 6


def write_tiny_qwen3(folder: Path) -> Path:
    """A seeded two-layer Qwen3 with the real Qwen3 tokenizer and chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    files = npm_tokenizer("qwen3")
    config = Qwen3Config(vocab_size=151_669, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
                         tie_word_embeddings=True, initializer_range=0.3, eos_token_id=151_645)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in files.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[Child]:
    model = name if name == "smollm2" else str(write_tiny_qwen3(folder))
    with running_worker(model=model, arguments=["--threads", "1", "--kv-memory", "64MiB", "--served-name", "m",
                                                "--exactness", "fast"],
                        env={"HEADSTART_WORKER_TOKEN": WORKER_TOKEN}) as child:
        yield child


@pytest.fixture(scope="module", params=MODELS)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with serving(request.param, Path(tmp_path_factory.mktemp("model"))) as child:
        yield child


async def ask(gateway: GatewayUnderTest, messages: list[dict[str, str]], *, stream: bool = False,
              **more: Any) -> tuple[str, dict[str, Any]]:
    """(text, usage) of one greedy chat."""
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": REPLY_TOKENS, "ignore_eos": True,
            "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {}), **more}
    answer = await gateway.send("POST", "/v1/chat/completions", payload=body)
    assert answer.status == 200, answer.body
    assert not any(name.startswith("x-headstart-ids") for name in answer.headers), "that is between us and the worker"
    if not stream:
        whole = orjson.loads(answer.body)
        return whole["choices"][0]["message"]["content"], whole["usage"]
    assert b": ids " not in answer.body
    chunks = [orjson.loads(line[6:]) for line in answer.body.splitlines()
              if line.startswith(b"data: {")]
    text = "".join(item["delta"].get("content") or "" for chunk in chunks for item in chunk["choices"])
    return text, chunks[-1]["usage"]


async def in_second_turn(gateway: GatewayUnderTest, question: str, *, stream: bool = False,
                         **more: Any) -> tuple[int, int, str]:
    """(tokens of the second turn found cached, the most that the first can have left there, the first's answer)."""
    first = [{"role": "user", "content": question}]
    text, usage = await ask(gateway, first, stream=stream, **more)
    again = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    _, second = await ask(gateway, again, stream=stream, max_tokens=2)
    most = (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    return second["prompt_tokens_details"]["cached_tokens"], most, text


async def num_tokens(gateway: GatewayUnderTest, text: str) -> int:
    """How many tokens the tokenizer itself makes of a text."""
    answer = await gateway.send("POST", "/tokenize", payload={"model": "m", "prompt": text,
                                                              "add_special_tokens": False})
    return int(orjson.loads(answer.body)["count"])


async def until_exact(gateway: GatewayUnderTest) -> None:
    """A large tokenizer takes its time to be proven on a busy machine."""
    for _ in range(PATIENCE):
        with contextlib.suppress(AssertionError):
            return await gateway.until_exact()
    await gateway.until_exact()


async def test_a_second_turn_hits_through_the_first_answer_however_it_is_spelled(worker: Child) -> None:
    async with running_gateway(worker.url, worker_token=WORKER_TOKEN) as gateway:
        await until_exact(gateway)
        for stream in (False, True):
            cached, most, _ = await in_second_turn(gateway, f"{QUESTION} ({stream})", stream=stream)
            assert cached >= most

        spelled = await gateway.send("POST", "/tokenize", payload={"model": "m", "prompt": "h",
                                                                   "add_special_tokens": False})
        (letter,) = orjson.loads(spelled.body)["tokens"]
        before = await gateway.metric('headstart_replies_total{outcome="kept"}')
        for stream in (False, True):
            cached, most, text = await in_second_turn(gateway, f"{QUESTION} [{stream}]", stream=stream,
                                                      logit_bias={str(letter): 100})
            assert text == "h" * REPLY_TOKENS
            assert await num_tokens(gateway, text) < REPLY_TOKENS, "the tokenizer would have spelled it so itself"
            assert cached >= most
        assert await gateway.metric('headstart_replies_total{outcome="kept"}') == before + 2
        assert await gateway.metric("headstart_reply_memory_bytes") > 0
        assert await gateway.metric('headstart_tokenizer_cache_segments_total{model="m",outcome="found"}') > 0
