"""A real worker process on a seeded model of some 50,000 parameters: loads in a blink, answers in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.local_stack import Child, running_worker
from tests.support.tiny_tokenizer import TINY_VOCAB_SIZE, write_tiny_tokenizer

MODEL_CONTEXT = 1024
WORKER_TOKEN = "tiny-worker-token"
SEED = 20


def write_tiny_model(folder: Path) -> Path:
    """A two-layer Llama with grouped heads, with its tokenizer and chat template, as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MODEL_CONTEXT, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0)
    write_tiny_tokenizer(folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tiny_tokenizer(folder)        # save_pretrained wrote its own generation_config.json
    return folder


@contextlib.contextmanager
def running_tiny_worker(model: Path, *arguments: str, wait: bool = True) -> Iterator[Child]:
    """`headstart worker` on the tiny model with a worker token, ready unless `wait` is False."""
    basics = ["--threads", "1", "--kv-memory", "4MiB", "--served-name", "tiny"]
    with running_worker(model=str(model), arguments=[*basics, *arguments],
                        env={"HEADSTART_WORKER_TOKEN": WORKER_TOKEN}, wait=wait) as child:
        yield child


def engine_pid(worker: Child) -> int:
    """The process behind the worker's HTTP front."""
    pid = worker.process.pid
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@contextlib.asynccontextmanager
async def worker_client(worker: Child) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose paths are relative to the worker."""
    async with aiohttp.ClientSession(worker.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def get_json(client: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with client.get(path) as response:
        assert response.status == 200, await response.text()
        return dict(await response.json(content_type=None))


async def until_idle(client: aiohttp.ClientSession, *, timeout_s: float = 20.0) -> dict[str, Any]:
    """GET /kv once no sequence runs or waits and no request is remembered."""
    async with asyncio.timeout(timeout_s):
        while True:
            state = await get_json(client, "/kv")
            load = state["load"]
            if load["running"] == load["waiting"] == load["requests"] == 0:
                return state
            await asyncio.sleep(0.01)
