"""What the worker publishes about its pool equals what the pool holds: live feed, replay, snapshot, /kv, /metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from loadtests.local_stack import Child
from tests.support.stack_api import eventually
from tests.support.tiny_worker import WORKER_TOKEN, get_json, running_tiny_worker, until_idle, worker_client
from worker.protocol.block_hash import HashScheme, continue_chain
from worker.protocol.cache_events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    ReplayEnd,
    SnapshotReader,
    decode_batch,
    encode_replay_request,
    parse_live_message,
    parse_replay_reply,
)
from worker.protocol.internal_request import WORKER_TOKEN_HEADER
from worker.server.block_mirror import BlockMirror

POOL_BLOCKS = 80
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4      # K and V, two layers, two KV heads of 8, float32
WAIT_S = 20.0
TOKEN = {WORKER_TOKEN_HEADER: WORKER_TOKEN}


async def ask(client: aiohttp.ClientSession, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True} | fields
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return dict(await response.json())


async def replay(endpoint: str) -> list[tuple[int, EventBatch]]:
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    await dealer.send_multipart(encode_replay_request(0))
    batches = []
    async with asyncio.timeout(WAIT_S):
        while not isinstance(reply := parse_replay_reply(await dealer.recv_multipart()), ReplayEnd):
            batches.append((reply.seq, decode_batch(reply.payload)))
    context.destroy(0)
    return batches


async def snapshot(client: aiohttp.ClientSession) -> tuple[SnapshotReader, list[BlockStored]]:
    reader = SnapshotReader()
    async with client.get("/kv/snapshot", headers=TOKEN) as response:
        assert response.status == 200
        blocks = reader.feed(await response.read())
    reader.close()
    return reader, blocks


def held(blocks: list[BlockStored]) -> set[tuple[int, int | None, tuple[int, ...]]]:
    return {(block.block_hashes[0], block.parent_block_hash, block.token_ids) for block in blocks}


@pytest.fixture(scope="module")
def small_pool(tiny_model: Path) -> Iterator[Child]:
    """A strict worker whose pool holds little more than one full context."""
    memory = str(POOL_BLOCKS * 16 * KV_BYTES_PER_TOKEN)
    with running_tiny_worker(tiny_model, "--kv-memory", memory, "--kv-dtype", "float32",
                             "--exactness", "strict") as worker:
        yield worker


async def test_replay_snapshot_and_pool_agree_under_eviction(small_pool: Child) -> None:
    async with worker_client(small_pool) as client:
        shared = "every prompt begins with these words, which fill a block or two; "
        await asyncio.gather(*(ask(client, shared + f"number {number} " * 8) for number in range(24)))
        state = await until_idle(client)
        assert state["blocks"]["total"] == POOL_BLOCKS
        evictions = await metric(client, "headstart_worker_evictions_total", reason="capacity")
        assert evictions > 0, "no pressure, no test"

        batches = await replay(state["events"]["replay_endpoint"])
        reader, blocks = await snapshot(client)
        assert [seq for seq, _ in batches] == list(range(len(batches)))
        assert isinstance(batches[0][1].events[0], AllBlocksCleared)
        assert {batch.epoch for _, batch in batches} == {state["epoch"]}
        assert reader.header is not None
        assert (reader.header.epoch, reader.header.barrier_seq) == (state["epoch"], len(batches))
        mirror = BlockMirror()
        for _, batch in batches:
            mirror.apply(batch.events)
        assert held(blocks) == held(mirror.blocks())
        assert len(blocks) == state["blocks"]["cached"], "idle: every findable block is cached, none is held"
        check_chain(blocks, await hash_scheme(client))
        # Blocks went as whole bursts, and each burst has its line.
        assert len(blocks) <= POOL_BLOCKS
        bursts = [line for line in log_lines(small_pool) if line["event"] == "evictions"]
        assert sum(line["blocks"] for line in bursts) == evictions
        assert all(line["for_request_id"] and line["recompute_tokens"] == 16 * line["blocks"] for line in bursts)


async def test_a_preempted_request_gives_the_same_answer_and_both_lines(small_pool: Child) -> None:
    asked = [{"prompt": [10 + number] * 500, "max_tokens": 450, "temperature": 0} for number in range(2)]
    async with worker_client(small_pool) as client:
        together = await asyncio.gather(*(ask(client, **body) for body in asked))
        await until_idle(client)
        lines = log_lines(small_pool)
        preemptions = [line for line in lines if line["event"] == "preemption"]
        assert preemptions, "two sequences of 950 tokens do not fit into 1,280"
        # The last admitted gives way, be it to the other or, when it is the one that finds no block, to itself.
        assert all(line["recompute_tokens"] > 0 and line["blocks"] > 0 and line["for_request_id"]
                   for line in preemptions)
        victims = [line for line in lines if line["event"] == "request_finished" and line["preemptions"]]
        assert {line["request_id"] for line in victims} == {line["request_id"] for line in preemptions}
        assert all(line["recomputed_tokens"] > 0 for line in victims)
        assert await metric(client, "headstart_worker_preemptions_total") == len(preemptions)
        assert await metric(client, "headstart_worker_recomputed_tokens_total", reason="preempted") == sum(
            line["recomputed_tokens"] for line in victims)
        for body, answer in zip(asked, together, strict=True):
            alone = await ask(client, **body)
            assert alone["choices"][0]["text"] == answer["choices"][0]["text"]


def log_lines(worker: Child) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in worker.log_tail(1_000_000).splitlines() if line.startswith("{")]


async def hash_scheme(client: aiohttp.ClientSession) -> HashScheme:
    async with client.get("/kv", headers=TOKEN) as response:
        return HashScheme.from_wire((await response.json())["hash_scheme"])


def check_chain(blocks: list[BlockStored], scheme: HashScheme) -> None:
    """Parents first, and every hash is what the one hash function makes of parent and tokens."""
    known: set[int] = set()
    for block in blocks:
        parent = scheme.root() if block.parent_block_hash is None else block.parent_block_hash
        keys = list(block.extra_keys)
        assert continue_chain(parent, block.token_ids, scheme, keys) == list(block.block_hashes)
        assert block.parent_block_hash is None or block.parent_block_hash in known, "a child before its parent"
        known.add(block.block_hashes[0])


async def test_the_live_feed_carries_on_from_the_snapshot(worker: Child, client: aiohttp.ClientSession) -> None:
    state = await until_idle(client)
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, state["events"]["topic"].encode())
    subscriber.connect(state["events"]["endpoint"])
    reader, blocks = await snapshot(client)
    assert reader.header is not None
    mirror = BlockMirror()
    mirror.apply(blocks)
    next_seq = reader.header.barrier_seq
    heard = 0
    async with asyncio.timeout(WAIT_S):
        while heard < 3:
            # Prompts go on until the subscription has taken effect and three batches have come.
            await ask(client, f"a prompt about the live feed, the {next_seq + heard}th, with words for a block")
            while await subscriber.poll(50):
                message = parse_live_message(await subscriber.recv_multipart())
                heard += 1
                if heard == 1 and message.seq > next_seq:       # what came before the subscription: from the replay
                    for seq, batch in await replay(state["events"]["replay_endpoint"]):
                        if next_seq <= seq < message.seq:
                            mirror.apply(batch.events)
                    next_seq = message.seq
                assert message.seq == next_seq
                mirror.apply(decode_batch(message.payload).events)
                next_seq += 1
    await until_idle(client)
    while await subscriber.poll(100):
        mirror.apply(decode_batch(parse_live_message(await subscriber.recv_multipart()).payload).events)
    _, blocks = await snapshot(client)
    assert held(blocks) == held(mirror.blocks())
    context.destroy(0)


async def test_reset_forgets_and_says_so(client: aiohttp.ClientSession) -> None:
    prompt = "a prompt that is long enough to leave a block or two of sixteen tokens in the cache"
    await ask(client, prompt)
    assert (await until_idle(client))["blocks"]["cached"] > 0
    async with client.post("/kv/reset", headers=TOKEN) as response:
        assert response.status == 202
    await eventually(lambda: nothing_cached(client), timeout_s=WAIT_S, what="the cache is empty")
    _, blocks = await snapshot(client)
    assert blocks == []
    answer = await ask(client, prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_what_shows_or_drops_blocks_needs_the_token(client: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "/kv/snapshot"), ("POST", "/kv/reset"), ("POST", "/abort")):
        async with client.request(method, path) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden")


async def nothing_cached(client: aiohttp.ClientSession) -> bool:
    return (await get_json(client, "/kv"))["blocks"]["cached"] == 0


async def test_kv_states_everything_a_gateway_needs(client: aiohttp.ClientSession) -> None:
    state = await get_json(client, "/kv")
    assert state["engine"] == "headstart"
    assert state["model"] == "tiny"
    assert state["block_size"] == 16
    assert state["max_context"] == 1024
    assert state["hash_scheme"]["block_size"] == 16
    assert len(state["hash_scheme_digest"]) == 64
    assert state["events"]["endpoint"].startswith("tcp://127.0.0.1:")
    assert state["events"]["replay_endpoint"] != state["events"]["endpoint"]
    blocks = state["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["used"] == blocks["total"] > 0
    assert state["rates"]["prefill_tokens_per_s"] > 0
    assert len(state["cpu"].pop("id")) == 16
    assert state["cpu"] == {"cores": len(os.sched_getaffinity(0)), "threads": 1}
    assert set(state["load"]) >= {"running", "waiting", "waiting_prefill_tokens", "running_prefill_tokens",
                                  "decode_context_tokens"}


async def test_kv_tells_whether_internal_requests_would_be_honoured(client: aiohttp.ClientSession) -> None:
    for headers, says in (({}, "refused"), ({"x-headstart-worker-token": "wrong"}, "refused"),
                          ({"x-headstart-worker-token": WORKER_TOKEN}, "accepted")):
        async with client.get("/kv", headers=headers) as response:
            assert (await response.json())["internal_requests"] == says


async def test_the_tokenizer_is_served_once_per_version(client: aiohttp.ClientSession) -> None:
    async with client.get("/tokenizer") as response:
        etag = response.headers["ETag"]
        assert b"tokenizer_json" in await response.read()
    async with client.get("/tokenizer", headers={"If-None-Match": etag}) as response:
        assert (response.status, response.headers["ETag"]) == (304, etag)
    async with client.get("/tokenizer", headers={"If-None-Match": '"other"'}) as response:
        assert response.status == 200


async def test_tokenize_and_detokenize_are_inverse(client: aiohttp.ClientSession) -> None:
    text = "naïve text with a 🦊 in it"
    asked = {"model": "tiny", "prompt": text, "return_token_strs": True}
    async with client.post("/tokenize", json=asked) as response:
        answer = await response.json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    async with client.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]}) as response:
        assert (await response.json())["prompt"] == text


async def test_tokenize_of_messages_is_the_prompt_of_chat(client: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with client.post("/tokenize", json={"model": "tiny", "messages": messages}) as response:
        count = (await response.json())["count"]
    async with client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages,
                                                         "max_tokens": 1}) as response:
        assert (await response.json())["usage"]["prompt_tokens"] == count


async def metric(client: aiohttp.ClientSession, name: str, **labels: str) -> float:
    async with client.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return sum(sample.value for family in text_string_to_metric_families(text) for sample in family.samples
               if sample.name == name and labels.items() <= sample.labels.items())


async def test_prompt_tokens_are_counted_once(client: aiohttp.ClientSession) -> None:
    await until_idle(client)
    queried, hit = [await metric(client, "headstart_worker_prefix_tokens_total", outcome=outcome)
                    for outcome in ("queried", "hit")]
    prompt = "a prompt for the counters: long enough for a block, and asked twice so that the second one hits"
    answers = [await ask(client, prompt) for _ in range(2)]
    await until_idle(client)
    sent = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert await metric(client, "headstart_worker_prefix_tokens_total", outcome="queried") - queried == sent
    assert await metric(client, "headstart_worker_prefix_tokens_total", outcome="hit") - hit == cached > 0
    assert await metric(client, "vllm:prefix_cache_hits_total") == hit + cached


@pytest.mark.parametrize("phase", ["tokenize", "queue", "allocate", "prefill", "sample"])
async def test_phases_are_timed(client: aiohttp.ClientSession, phase: str) -> None:
    await ask(client, "one more prompt for the clock")
    await until_idle(client)
    assert await metric(client, "headstart_worker_ttft_seconds_count", phase=phase) > 0


async def test_one_line_per_request_without_its_text(worker: Child, client: aiohttp.ClientSession) -> None:
    secret = "zanzibar"
    asked = {"model": "tiny", "prompt": secret * 8, "max_tokens": 5, "ignore_eos": True}
    async with client.post("/v1/completions", json=asked, headers={"x-request-id": "from-the-gateway-1"}) as response:
        assert response.status == 200
    await until_idle(client)
    [line] = [line for line in log_lines(worker)
              if line["event"] == "request_finished" and line["request_id"] == "from-the-gateway-1"]
    assert line["prompt_tokens"] == line["cached_tokens"] + line["computed_tokens"]
    assert (line["output_tokens"], line["finish_reason"], line["preemptions"]) == (5, "length", 0)
    assert set(line["ttft_ms"]) == {"tokenize", "queue", "allocate", "prefill", "recompute", "sample"}
    assert line["inter_token_ms"]["p50"] <= line["inter_token_ms"]["max"]
    assert 0 <= line["hit_ratio"] <= 1
    assert line["recomputed_tokens"] == 0
    assert secret not in worker.log_tail(1_000_000)
