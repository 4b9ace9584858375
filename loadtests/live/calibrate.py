"""Measures live workers for a cost model: cold prompts of several lengths alone, and steps of several batches.

Owns what is sent. All workers are measured at the same time, since in what follows they run at the same time too, on
the same cores.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise

import aiohttp

from loadtests.live.prompts import TOKENS_FROM, TOKENS_TO
from loadtests.sim.fit import DecodeStep, Prefill
from loadtests.streaming_client import COMPLETIONS_PATH, TimedAnswer, timed_stream

PREFILLS = (32, 128, 512, 1024, 2048)
BATCHES = ((1, 64), (1, 1024), (4, 256), (8, 64), (8, 1024))   # streams, context of each
STREAM_TOKENS = 24
WARM_UP = 2


async def calibrate(urls: Sequence[str], model: str, *, rounds: int, seed: int) -> list[Prefill | DecodeStep]:
    """Samples of every worker. Prompts are random, so nothing of them is cached."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        probes = [_Probe(http, url, model, random.Random(f"{seed} {number}")) for number, url in enumerate(urls)]
        await asyncio.gather(*(probe.prefill(PREFILLS[-1]) for probe in probes for _ in range(WARM_UP)))
        measured = await asyncio.gather(*(probe.measure(rounds) for probe in probes))
    return [sample for samples in measured for sample in samples]


class _Probe:
    """One worker's measuring."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, draw: random.Random) -> None:
        self._http = http
        self._address = url + COMPLETIONS_PATH
        self._model = model
        self._draw = draw

    async def measure(self, rounds: int) -> list[Prefill | DecodeStep]:
        samples: list[Prefill | DecodeStep] = []
        for _ in range(rounds):
            samples += [await self.prefill(length) for length in PREFILLS]
            samples += [await self._step(streams, context) for streams, context in BATCHES]
        return samples

    async def prefill(self, length: int) -> Prefill:
        answer = await self._ask(length, 1)
        return Prefill(length, answer.ttft_s)

    async def _step(self, num_streams: int, context: int) -> DecodeStep:
        """The mean gap of streams that run together, from when all of them run."""
        answers = await asyncio.gather(*(self._ask(context, STREAM_TOKENS) for _ in range(num_streams)))
        all_run_at = max(answer.ttft_s for answer in answers)
        gaps = [later - earlier for answer in answers
                for earlier, later in pairwise(answer.token_at_s) if earlier >= all_run_at]
        if not gaps:
            gaps = [answer.seconds_per_token for answer in answers]
        return DecodeStep(num_streams, context + STREAM_TOKENS / 2, statistics.fmean(gaps))

    async def _ask(self, length: int, max_tokens: int) -> TimedAnswer:
        prompt = [self._draw.randrange(TOKENS_FROM, TOKENS_TO) for _ in range(length)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}
        return await timed_stream(self._http, self._address, body)
