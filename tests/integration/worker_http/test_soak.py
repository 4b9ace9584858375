"""Many requests on a pool of one and a half prompts. Clients leave, abort and are preempted; the rest is as if alone.

The default run is short; `make soak-worker` sends 2,000 requests. Strict exactness: every answer that was finished
has the text, and every one that was not a beginning of the text, that an undisturbed worker gives.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_worker import WORKER_TOKEN, running_tiny_worker, until_idle, worker_client
from worker.protocol.internal_request import WORKER_TOKEN_HEADER

TOKEN = {WORKER_TOKEN_HEADER: WORKER_TOKEN}
STEM_TOKENS, PROMPT_TOKENS_MAX, OUTPUT_TOKENS = 96, 160, (32, 72)
KV_BYTES_PER_TOKEN = 256        # 2 layers, 2 heads of 8, keys and values, float32
POOL = f"{3 * PROMPT_TOKENS_MAX // 2 * KV_BYTES_PER_TOKEN}"
NUM_KINDS = 12
CONCURRENCY = 12
RETRY_S = 0.1
MEMORY_SLACK_BYTES = 24 * 2**20
LIMITS = ("--max-running", "6", "--max-waiting", "4")    # fewer than come at once: some are refused


@dataclass(frozen=True)
class Kind:
    """One request as it may be sent many times, and its whole text when nobody disturbs it."""

    body: dict[str, Any]
    text: str


@dataclass
class Outcomes:
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def make_bodies() -> list[dict[str, Any]]:
    chance = random.Random(11)
    stems = [chance.choices(range(3, 300), k=STEM_TOKENS) for _ in range(2)]
    bodies = []
    for index in range(NUM_KINDS):
        tail = chance.choices(range(3, 300), k=chance.choice([4, 8, PROMPT_TOKENS_MAX - STEM_TOKENS]))
        bodies.append({
            "model": "tiny", "prompt": chance.choice(stems) + tail, "ignore_eos": True, "stream": True,
            "max_tokens": chance.randint(*OUTPUT_TOKENS), "seed": index,
            "temperature": chance.choice([0.0, 1.0])})
    return bodies


@pytest.fixture(scope="module")
def crowded(tiny_model: Path) -> Iterator[Child]:
    with running_tiny_worker(tiny_model, "--exactness", "strict", "--kv-memory", POOL, *LIMITS) as worker:
        yield worker


@pytest.fixture(scope="module")
def kinds(crowded: Child) -> list[Kind]:
    """What each request gives undisturbed: alone, and from an empty cache."""
    async def alone() -> list[Kind]:
        found = []
        async with worker_client(crowded) as client:
            for body in make_bodies():
                await reset(client)
                async with client.post("/v1/completions", json=body) as response:
                    text, ending = read_events(await response.read())
                    assert ending == "done"
                    found.append(Kind(body, text))
        return found

    return asyncio.run(alone())


def test_a_crowd_on_a_small_pool(crowded: Child, kinds: list[Kind]) -> None:
    asyncio.run(soak(crowded, kinds, num_requests=50))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_requests_on_a_small_pool(crowded: Child, kinds: list[Kind]) -> None:
    asyncio.run(soak(crowded, kinds, num_requests=500))
    before = memory_bytes(crowded)
    asyncio.run(soak(crowded, kinds, num_requests=1500))
    assert memory_bytes(crowded) < before + MEMORY_SLACK_BYTES


async def soak(worker: Child, kinds: list[Kind], *, num_requests: int) -> None:
    """Send them, CONCURRENCY at once; everything is answered or refused, right, and nothing is left behind."""
    chance = random.Random(num_requests)
    outcomes, todo = Outcomes(), iter(range(num_requests))

    async def client_loop(client: aiohttp.ClientSession) -> None:
        for number in todo:
            await one_request(client, chance.choice(kinds), outcomes, name=f"{num_requests}-{number}",
                              whim=chance.choices(["stay", "leave", "abort"], [70, 15, 15])[0],
                              patience=chance.randint(0, 8))

    async with worker_client(worker) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(CONCURRENCY)))
        state = await until_idle(client)
        print(dict(outcomes.seen))
        assert not outcomes.wrong, outcomes.wrong[:3]
        assert sum(outcomes.seen.values()) - outcomes.seen["refused"] == num_requests
        assert min(outcomes.seen[what] for what in ("done", "left", "abort", "refused")) > 0, outcomes.seen
        assert state["blocks"]["used"] == 0
        assert state["blocks"]["free"] + state["blocks"]["cached"] == state["blocks"]["total"]
        assert await metric(client, "headstart_worker_preemptions_total") > 0
        await reset(client)


async def one_request(client: aiohttp.ClientSession, kind: Kind, outcomes: Outcomes, *, name: str, whim: str,
                      patience: int) -> None:
    """Send it until it is taken; leave or abort after `patience` lines if that is the whim."""
    raw = b""
    while True:
        response = await client.post("/v1/completions", json=kind.body, headers={"x-request-id": name})
        if response.status == 200:
            break
        await note_refusal(response, outcomes)
    async with response:
        for _ in range(patience if whim != "stay" else 0):
            raw += await response.content.readline()
        if whim == "leave":
            response.close()
            outcomes.seen["left"] += 1
            return
        if whim == "abort":
            async with client.post("/abort", json={"request_id": name}, headers=TOKEN) as aborted:
                assert aborted.status == 200
        raw += await response.content.read()
    text, ending = read_events(raw)
    outcomes.seen[ending] += 1
    if text != kind.text if ending == "done" else not kind.text.startswith(text.rstrip("\ufffd")):
        outcomes.wrong.append(f"{name} {whim} {ending}: {text!r} and not {kind.text!r}")


async def note_refusal(response: aiohttp.ClientResponse, outcomes: Outcomes) -> None:
    outcomes.seen["refused"] += 1
    error = (await response.json())["error"]
    if (response.status, error["code"]) != (429, "queue_full") or int(response.headers["Retry-After"]) < 1:
        outcomes.wrong.append(f"refused with {response.status} {error}")
    await asyncio.sleep(RETRY_S)


def read_events(raw: bytes) -> tuple[str, str]:
    """The text, and how the answer ended: "done", "abort", or whatever else it says."""
    text, ending = "", "cut short"
    for line in raw.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line.removeprefix(b"data: "))
        if "error" in event:
            return text, f"error {event['error']}"
        [choice] = event["choices"]
        text += choice["text"]
        if choice["finish_reason"] is not None:
            ending = "done" if choice["finish_reason"] == "length" else choice["finish_reason"]
    return text, ending


async def metric(client: aiohttp.ClientSession, name: str) -> float:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])


async def reset(client: aiohttp.ClientSession) -> None:
    """Empty the cache; every block must come back."""
    async with client.post("/kv/reset", headers=TOKEN) as response:
        assert response.status == 202
    async with asyncio.timeout(20):
        while True:
            blocks = (await until_idle(client))["blocks"]
            if blocks["free"] == blocks["total"]:
                return


def memory_bytes(worker: Child) -> int:
    """Resident memory of the shell and of its engine."""
    pid = worker.process.pid
    [engine] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    statuses = [Path(f"/proc/{each}/status").read_text().splitlines() for each in (pid, engine)]
    lines = [line.split() for status in statuses for line in status]
    return sum(int(parts[1]) * 1024 for parts in lines if parts[0] == "VmRSS:")
