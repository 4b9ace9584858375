"""What loadtests.bench.serving sends, and what it reads off the answers. Knows no worker's flags."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.streaming_client import TimedAnswer, timed_chat

WORDS = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business"""
VOCABULARY = WORDS.split()

NUM_SHORT, SHORT_TOKENS, LONG_TOKENS, LONG_AT = 15, 16, 512, 3
STAGGER_S = 0.5
NUM_STREAMS, STREAM_TOKENS, CONTROL_TOKENS = 8, 350, 40
STREAM_PROMPT_TOKENS = 70      # 30 words and what a template says besides, at most
LONG_PROMPT_WORDS = 5_900       # a word of the list is a token, or a little more
WORDS_TOGETHER = 300
BATCH = 16
NUM_CLIENTS, CLIENT_TOKENS = 64, 40


def prompt(seed: object, num_words: int) -> str:
    """The same for the same seed; shares no block with another seed's, since it begins with its own words."""
    return " ".join(random.Random(str(seed)).choices(VOCABULARY, k=num_words))


def body(text: str, max_tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
            "ignore_eos": True, "temperature": 0.0, "return_token_ids": True, **fields}


async def staggered(session: aiohttp.ClientSession, url: str, *, seed: int, groups: int, pid: int) -> dict[str, Any]:
    """One request every STAGGER_S, sixteen a group; the one at LONG_AT in each group asks for a long answer."""
    kinds = ([SHORT_TOKENS] * LONG_AT + [LONG_TOKENS] + [SHORT_TOKENS] * (NUM_SHORT - LONG_AT)) * groups
    cpu_before, started = cpu_seconds(pid), time.perf_counter()

    async def one(index: int, max_tokens: int) -> tuple[int, TimedAnswer]:
        await asyncio.sleep(index * STAGGER_S)
        return max_tokens, await timed_chat(session, url, body(prompt((seed, index), 40), max_tokens))

    answers = await asyncio.gather(*(one(index, max_tokens) for index, max_tokens in enumerate(kinds)))
    took_s, took_cpu_s = time.perf_counter() - started, cpu_seconds(pid) - cpu_before
    num_tokens = sum(answer.completion_tokens for _, answer in answers)
    short = sorted(answer.total_s for max_tokens, answer in answers if max_tokens == SHORT_TOKENS)
    return {"short_p95_s": percentile(short, 0.95), "short_p50_s": statistics.median(short),
            "long_s": max(answer.total_s for _, answer in answers), "took_s": took_s,
            "tokens_per_s": num_tokens / took_s, "tokens_per_cpu_s": num_tokens / took_cpu_s}


async def gaps_beside_a_prefill(session: aiohttp.ClientSession, url: str, *, seed: int) -> dict[str, float]:
    """p99 of the gaps of streams, in the time before a long prompt arrives and in the time of its prefill."""
    began = time.perf_counter()

    async def stream(index: int) -> tuple[float, TimedAnswer]:
        started = time.perf_counter() - began
        return started, await timed_chat(session, url, body(prompt((seed, "stream", index), 30), STREAM_TOKENS))

    streams = [asyncio.create_task(stream(index)) for index in range(NUM_STREAMS)]
    await _until_tokens(session, url, NUM_STREAMS * (STREAM_PROMPT_TOKENS + CONTROL_TOKENS))
    arrives = time.perf_counter() - began
    long = await timed_chat(session, url, body(prompt((seed, "long"), LONG_PROMPT_WORDS), 1))
    ends = time.perf_counter() - began
    before: list[float] = []
    beside: list[float] = []
    for started, answer in await asyncio.gather(*streams):
        instants = [started + at for at in answer.token_at_s]
        for earlier, later in pairwise(instants):
            if later <= arrives:
                before.append(later - earlier)
            elif arrives <= earlier and later <= ends:
                beside.append(later - earlier)
    return {"prompt_tokens": long.prompt_tokens, "long_ttft_s": long.ttft_s, "gaps_before": len(before),
            "gaps_beside": len(beside), "p99_before_s": percentile(before, 0.99),
            "p99_beside_s": percentile(beside, 0.99), "p50_before_s": statistics.median(before),
            "p50_beside_s": statistics.median(beside),
            "raised_p99_s": percentile(beside, 0.99) - percentile(before, 0.99)}


async def ten_distinct_prompts(session: aiohttp.ClientSession, url: str, *, seed: int,
                               pid: int) -> tuple[list[float], list[float]]:
    """Ten requests, one after the other, of equal length and with nothing in common, for one token each: their TTFT,
    and the CPU seconds that all of the worker's threads took for each."""
    ttft_s, cpu_s = [], []
    for index in range(10):
        before = cpu_seconds(pid)
        answer = await timed_chat(session, url, body(prompt((seed, index), WORDS_TOGETHER), 1))
        ttft_s.append(answer.ttft_s)
        cpu_s.append(cpu_seconds(pid) - before)
    return ttft_s, cpu_s


async def engine_cpu_of_64(session: aiohttp.ClientSession, url: str, *, seed: int, stream: bool, pid: int) -> float:
    """CPU seconds that a token costs the engine where 64 clients are answered at once: token by token, or whole."""
    before = engine_cpu_seconds(pid)

    async def whole(text: str) -> int:
        asked = body(text, CLIENT_TOKENS, stream=False)
        async with session.post(f"{url}/v1/chat/completions", json=asked) as response:
            return int((await response.json(content_type=None))["usage"]["completion_tokens"])

    async def streamed(text: str) -> int:
        return (await timed_chat(session, url, body(text, CLIENT_TOKENS))).completion_tokens

    ask = streamed if stream else whole
    counts = await asyncio.gather(*(ask(prompt((seed, index), 30)) for index in range(NUM_CLIENTS)))
    return (engine_cpu_seconds(pid) - before) / sum(counts)


def engine_cpu_seconds(pid: int) -> float:
    """Of a worker's children alone, all threads."""
    return _thread_seconds(_children(pid))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children, all threads."""
    return _thread_seconds([str(pid), *_children(pid)])


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _thread_seconds(pids: Sequence[str]) -> float:
    threads = [thread for each in pids for thread in Path(f"/proc/{each}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def overhead_at_batch_16(session: aiohttp.ClientSession, url: str, *, seed: int) -> dict[str, float]:
    """From the worker's own counters: time between two runs of the model, over the whole of decode steps."""
    before = await _decode_seconds(session, url)
    await asyncio.gather(*(timed_chat(session, url, body(prompt((seed, index), 30), 64)) for index in range(BATCH)))
    after = await _decode_seconds(session, url)
    steps, run_s, overhead_s = (late - early for early, late in zip(before, after, strict=True))
    return {"decode_steps": steps, "step_s": run_s / steps, "overhead_s": overhead_s / steps,
            "overhead_ratio": overhead_s / (run_s + overhead_s)}


async def _decode_seconds(session: aiohttp.ClientSession, url: str) -> tuple[float, float, float]:
    """Decode steps so far, the seconds inside them, and those between them."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)
              if 'kind="decode"' in name}
    return (values.get('headstart_worker_step_seconds_count{kind="decode"}', 0.0),
            values.get('headstart_worker_step_seconds_sum{kind="decode"}', 0.0),
            values.get('headstart_worker_step_overhead_seconds_total{kind="decode"}', 0.0))


async def get_json(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as response:
        return dict(await response.json(content_type=None))


async def _until_tokens(session: aiohttp.ClientSession, url: str, num_tokens: int) -> None:
    """Until the worker has computed so many positions more."""
    start = (await get_json(session, f"{url}/kv"))["computed_positions_total"]
    while (await get_json(session, f"{url}/kv"))["computed_positions_total"] < start + num_tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
