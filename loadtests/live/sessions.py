"""Conversations for a live comparison: which ones, when each turn is due, and how many a second saturate a fleet.

Owns the arrivals, by seed. It must never compare anything.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import aiohttp

from loadtests.live.prompts import PromptMaker
from loadtests.streaming_client import timed_stream
from loadtests.traces import Trace, TraceRequest

# How long a conversation takes, as a share of a run.
SESSION_SHARE = 0.3
SESSIONS_MIN = 16


def by_session(trace: Trace) -> list[list[TraceRequest]]:
    """Each conversation's requests, in the trace's order."""
    sessions: defaultdict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        sessions[request.session].append(request)
    return list(sessions.values())


def overlapping(trace: Trace, *, rate: float, span_s: float, seed: int) -> Trace:
    """Conversations that give `rate` requests a second, steadily once the first of them are under way: they begin at
    random over the whole span, each takes SESSION_SHARE of it with turns at random intervals, and what would come
    after the span is left out. So the rate rises over the first SESSION_SHARE and stays. They are whole ones where
    that leaves at least SESSIONS_MIN, else they end early."""
    draw = random.Random(seed)
    sessions = by_session(trace)
    draw.shuffle(sessions)
    turns_max = max(2, int(rate * span_s / SESSIONS_MIN))
    num_sent = 0
    chosen: list[TraceRequest] = []
    for turns in (session[:turns_max] for session in sessions):
        if num_sent >= rate * span_s:
            break
        num_sent += len(turns)
        at_s, gap_s = draw.uniform(0, span_s), SESSION_SHARE * span_s / len(turns)
        for turn in turns:
            chosen.append(replace(turn, at_s=at_s))
            at_s += draw.expovariate(1 / gap_s)
    return replace(trace, requests=tuple(sorted((request for request in chosen if request.at_s < span_s),
                                                key=lambda request: request.at_s)))


async def saturation_per_s(trace: Trace, url: str, prompts: PromptMaker, *, clients: int, span_s: float) -> float:
    """Requests a second when so many clients ask without a pause, each one conversation after the other."""
    sessions, num_done, began_at = iter(by_session(trace)), 0, time.perf_counter()

    async def client(http: aiohttp.ClientSession) -> None:
        nonlocal num_done
        for turns in sessions:
            for turn in turns:
                asked = prompts.asked(turn, 0, {})
                await timed_stream(http, url + asked.path, asked.body)
                if time.perf_counter() - began_at > span_s:
                    return
                num_done += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return num_done / span_s


def text_of(trace: Trace) -> str:
    """All that was said, once: what a tokenizer may learn."""
    longest: Sequence[TraceRequest] = [turns[-1] for turns in by_session(trace)]
    return "\n".join(dict.fromkeys(message.text for request in longest for message in request.messages))
