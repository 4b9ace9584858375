"""What the gateway believes of its workers' caches while events get lost, doubled, torn, and workers come and go."""

from __future__ import annotations

import asyncio
import random
from itertools import takewhile

import pytest
import zmq

from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import BLOCK_SIZE, OTHER_TEMPLATE, StubWorker, rest_of, running
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, CacheEvent, encode_live_message


def tokens(start: int, num_blocks: int) -> list[int]:
    return [(start + index) % 256 for index in range(num_blocks * BLOCK_SIZE)]


async def until_blocks(gateway: GatewayUnderTest, num_blocks: int, index: int = 0) -> None:
    async def holds() -> bool:
        row = await gateway.worker(index)
        return bool(row["blocks"] == num_blocks and row["knowledge"] == "exact")

    await gateway.until(holds, f"worker {index} is known to hold {num_blocks} blocks")


async def test_events_are_followed_and_removals_believed() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        one, two = stub.stored(tokens(1, 3)), stub.stored(tokens(99, 2))
        await stub.publish([one, two])
        await until_blocks(gateway, 5)
        await stub.publish([BlockRemoved(one.block_hashes[2:])])
        await until_blocks(gateway, 4)
        await stub.publish([AllBlocksCleared()])
        await until_blocks(gateway, 0)
        assert (await gateway.worker())["events"]["gaps"] == 0


async def test_what_the_worker_held_before_the_gateway_came_is_in_the_snapshot() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub):
        await stub.publish([stub.stored(tokens(1, 4))])
        async with running_gateway(stub.url) as gateway:
            await gateway.until_exact()
            await until_blocks(gateway, 4)
            await stub.publish([stub.stored(tokens(7, 2))])
            await until_blocks(gateway, 6)


async def test_a_gap_is_filled_by_a_replay() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        await stub.publish([stub.stored(tokens(1, 2))], lose=True)
        await stub.publish([stub.stored(tokens(50, 3))], lose=True)
        await stub.publish([stub.stored(tokens(100, 1))])
        await until_blocks(gateway, 6)
        row = await gateway.worker()
        assert (row["knowledge"], row["events"]["gaps"], row["events"]["resyncs"]) == ("exact", 1, 1)
        assert await gateway.metric(f'headstart_event_gaps_total{{worker="{row["id"]}"}}') == 1


async def test_a_gap_older_than_the_workers_ring_is_filled_by_a_snapshot() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stub.ring_size = 2
        for start in (1, 60, 120, 180):
            await stub.publish([stub.stored(tokens(start, 2))], lose=True)
        await stub.publish([stub.stored(tokens(240, 1))])
        await until_blocks(gateway, 9)
        row = await gateway.worker()
        assert (row["knowledge"], row["events"]["resyncs"]) == ("exact", 2)


async def test_a_batch_that_arrives_twice_counts_once() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stored = stub.stored(tokens(1, 2))
        await stub.publish([stored], times=3)
        await until_blocks(gateway, 2)
        await stub.publish([BlockRemoved(stored.block_hashes)])
        await until_blocks(gateway, 0)  # one removal is enough: the repeats added no references
        assert (await gateway.worker())["events"]["duplicates"] >= 2


async def test_a_batch_that_cannot_be_read_costs_a_resync_and_nothing_else() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        await stub.publish([stub.stored(tokens(1, 2))], lose=True)
        await stub._pub.send_multipart(encode_live_message(b"", 2, b"\xc1 not msgpack"))
        await until_blocks(gateway, 2)
        await gateway.until_exact()
        assert (await gateway.worker())["events"]["undecodable"] == 1


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_lost_or_doubled_the_index_ends_equal_to_the_worker(seed: int) -> None:
    """Random stores, extensions, removals and clears, of which a third never arrive and a few arrive twice."""
    chance, stub = random.Random(seed), StubWorker(worker_token=WORKER_TOKEN)
    stub.ring_size = chance.choice([3, 20, 1000])
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        for _ in range(150):
            await stub.publish([_random_event(chance, stub)], lose=chance.random() < 0.35,
                               times=chance.choice([1, 1, 1, 2]))
            if chance.random() < 0.1:
                await asyncio.sleep(0.002)
        await stub.publish([stub.stored(tokens(255, 1))])
        # A feed that closes a gap or starts over may pass through equality: it has ended well when it is exact too.
        await gateway.until(lambda: _equals(gateway, stub), "the index equals the worker's cache, known as exact")
        row = await gateway.worker()
        assert row["events"]["gaps"] > 0, "nothing was lost, so nothing was tested"
        gateway.gateway.state.index.check_invariants()


def _random_event(chance: random.Random, stub: StubWorker) -> CacheEvent:
    kind = chance.random()
    leaves = set(stub.blocks) - {block.parent_block_hash for block in stub.blocks.values()}
    if kind < 0.35 and leaves:
        return BlockRemoved((chance.choice(sorted(leaves)),))
    if kind < 0.37:
        return AllBlocksCleared()
    whole = stub.stored(tokens(chance.randrange(12) * 20, chance.randrange(1, 6)))
    num_held = sum(1 for _ in takewhile(stub.blocks.__contains__, whole.block_hashes))
    if num_held == len(whole.block_hashes):
        return stub.stored(tokens(chance.randrange(10**6), 1)) if not num_held else BlockRemoved(())
    return rest_of(whole, num_held) if num_held else whole


async def _equals(gateway: GatewayUnderTest, stub: StubWorker) -> bool:
    row, index = await gateway.worker(), gateway.gateway.state.index
    is_exact = row["knowledge"] == "exact"
    return (is_exact and row["blocks"] == len(stub.blocks)
            and all(index.holds(row["id"], held) for held in stub.blocks))


async def test_a_restarted_workers_old_blocks_are_forgotten() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    await stub.start()
    async with running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        await stub.publish([stub.stored(tokens(1, 8))])
        await until_blocks(gateway, 8)
        before = await gateway.worker()
        await stub.stop()
        await stub.start()  # same address, another epoch and other event ports
        try:
            await gateway.until(lambda: _has_other_epoch(gateway, before["epoch"]), "the new life is noticed")
            await gateway.until_exact()
            await until_blocks(gateway, 0)
            assert stub.num_unchanged_tokenizers == 1, "its tokenizer is not fetched a second time"
            await stub.publish([stub.stored(tokens(1, 1))])
            await until_blocks(gateway, 1)
        finally:
            await stub.stop()


async def _has_other_epoch(gateway: GatewayUnderTest, epoch: str) -> bool:
    row = await gateway.worker()
    return bool(row["state"] == "ready" and row["epoch"] != epoch)


async def test_a_lost_event_connection_ends_exactness_until_the_next_snapshot() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        address = stub._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        stub._pub.close(0)
        await gateway.until(lambda: _is_approximate(gateway), "exactness ends")
        await stub.publish([stub.stored(tokens(1, 2))], lose=True)
        stub._pub = stub._context.socket(zmq.PUB)
        stub._pub.bind(address)
        await gateway.until_exact()
        await until_blocks(gateway, 2)


async def test_where_others_send_work_all_workers_are_looked_at_more_often() -> None:
    alone, idle, shared = (StubWorker(worker_token=WORKER_TOKEN) for _ in range(3))
    shared.num_running = 5

    async def are_ahead() -> bool:
        return min(idle.num_looks, shared.num_looks) >= alone.num_looks + 10

    async with (running(alone, idle, shared), running_gateway(alone.url, health_interval_s=0.4) as lone,
                running_gateway(idle.url, shared.url, health_interval_s=0.4) as gateway):
        await lone.until_exact()
        await gateway.until_exact(num_workers=2)
        await gateway.until(are_ahead, "looks are more frequent where others send work")


async def _is_approximate(gateway: GatewayUnderTest) -> bool:
    return bool((await gateway.worker())["knowledge"] == "approximate")


async def test_another_template_makes_a_worker_incompatible_and_is_named() -> None:
    right, wrong = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN,
                                                                     chat_template=OTHER_TEMPLATE)
    async with running(right):
        await wrong.start()
        try:
            async with running_gateway(right.url, wrong.url, health_interval_s=0.2) as gateway:
                await gateway.until(lambda: _both_joined(gateway), "both have joined")
                rows = [await gateway.worker(index) for index in range(2)]
                states = sorted(row["state"] for row in rows)
                assert states == ["incompatible", "ready"]
                row = next(row for row in rows if row["state"] == "incompatible")
                assert row["knowledge"] == "none"
                assert row["parity"]["ok"] is False
                assert row["parity"]["position"] == 0
                assert {row["parity"]["gateway_token"], row["parity"]["worker_token"]} == {
                    right.renderer.tokenizer.encode(text, add_special_tokens=False)[0] for text in "<["}
                for number in range(5):
                    answer = await gateway.chat(f"request {number}")
                    assert answer.headers["x-headstart-worker"] != row["id"]
        finally:
            await wrong.stop()


async def test_a_worker_that_joins_while_another_is_still_joining_does_not_take_its_place() -> None:
    first, second = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN,
                                                                      chat_template=OTHER_TEMPLATE)
    first.may_be_probed.clear()
    second.kv_problem = 503
    async with running(first, second), running_gateway(first.url, second.url) as gateway:
        await asyncio.wait_for(first.was_probed.wait(), 10)
        second.kv_problem = None
        await gateway.until(lambda: _has_state(gateway, 1, "incompatible"), "the second is measured by the first")
        first.may_be_probed.set()
        await gateway.until(lambda: _has_state(gateway, 0, "ready"), "the first has set the reference")
        assert (await gateway.worker(1))["state"] == "incompatible"


async def _both_joined(gateway: GatewayUnderTest) -> bool:
    return all([(await gateway.worker(index))["epoch"] for index in range(2)])


async def test_an_incompatible_worker_serves_plain_json_when_nobody_else_does() -> None:
    right, wrong = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN,
                                                                     chat_template=OTHER_TEMPLATE)
    async with running(right, wrong):
        wrong.kv_problem = 503
        async with running_gateway(right.url, wrong.url) as gateway:
            await gateway.until(lambda: _has_state(gateway, 0, "ready"), "the reference is there")
            wrong.kv_problem = None
            await gateway.until(lambda: _has_state(gateway, 1, "incompatible"), "the other is refused")
            drained = (await gateway.worker(0))["id"]
            assert (await gateway.send("POST", f"/admin/workers/{drained}/drain", headers=ADMIN)).status == 202
            answer = await gateway.chat()
            assert answer.status == 200
            assert not wrong.seen[0].internal, "its own template must render this"
            assert answer.headers["x-headstart-matched-tokens"] == "0"


async def test_when_the_last_worker_with_the_old_template_is_gone_the_next_sets_the_reference() -> None:
    old, new = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN,
                                                                 chat_template=OTHER_TEMPLATE)
    await old.start()
    async with running(new):
        new.kv_problem = 503
        async with running_gateway(old.url, new.url) as gateway:
            await gateway.until(lambda: _has_state(gateway, 0, "ready"), "the old template serves")
            await old.stop()
            await gateway.until(lambda: _has_state(gateway, 0, "unready"), "it is gone")
            new.kv_problem = None
            await gateway.until(lambda: _has_state(gateway, 1, "ready"), "the new template is the reference")
            await gateway.chat()
            assert new.seen[0].internal


@pytest.mark.parametrize("how", ["one by one", "all at once"])
async def test_workers_that_came_while_the_old_template_served_serve_when_it_is_gone(how: str) -> None:
    """One by one: the last one replaced sets the reference. All at once: nobody joins after the old ones are gone."""
    old, new, last = StubWorker(worker_token=WORKER_TOKEN), *(
        StubWorker(worker_token=WORKER_TOKEN, chat_template=OTHER_TEMPLATE) for _ in range(2))
    await old.start()
    async with running(new, last):
        new.kv_problem = last.kv_problem = 503
        async with running_gateway(old.url, new.url, last.url) as gateway:
            await gateway.until(lambda: _has_state(gateway, 0, "ready"), "the old template serves")
            new.kv_problem = None
            await gateway.until(lambda: _has_state(gateway, 1, "incompatible"), "a new one is refused beside it")
            await old.stop()
            await gateway.until(lambda: _has_state(gateway, 0, "unready"), "the old one is gone")
            if how == "one by one":
                last.kv_problem = None
                await gateway.until(lambda: _has_state(gateway, 2, "ready"), "the last one is there")
            await gateway.until(lambda: _has_state(gateway, 1, "ready"), "the one that was refused serves")
            await gateway.until(lambda: _knows_exactly(gateway, 1), "and its blocks are known")
            assert (await gateway.worker(1))["detail"] == ""


async def _knows_exactly(gateway: GatewayUnderTest, index: int) -> bool:
    return bool((await gateway.worker(index))["knowledge"] == "exact")


async def _has_state(gateway: GatewayUnderTest, index: int, state: str) -> bool:
    return bool((await gateway.worker(index))["state"] == state)


async def test_workers_that_hash_differently_each_keep_their_own_chain() -> None:
    fast, strict = (StubWorker(worker_token=WORKER_TOKEN, exactness=name) for name in ("fast", "strict"))
    async with running(fast, strict), running_gateway(fast.url, strict.url) as gateway:
        await gateway.until_exact(num_workers=2)
        assert fast.scheme.root() != strict.scheme.root()
        text = "A text of several blocks that each worker hashes under a scheme of its own."
        first = await gateway.chat(text)
        again = await gateway.chat(text)
        assert again.headers["x-headstart-worker"] == first.headers["x-headstart-worker"]
        holder = fast if first.headers["x-headstart-worker"] == fast.url.removeprefix("http://") else strict
        assert int(again.headers["x-headstart-matched-tokens"]) == holder.seen[1].cached_tokens > 0


async def test_a_drained_worker_gets_no_new_work_until_its_next_life() -> None:
    stub, other = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    await stub.start()
    async with running(other), running_gateway(stub.url, other.url) as gateway:
        await gateway.until_exact(num_workers=2)
        row = await gateway.worker(0)
        headers = {"Authorization": "Bearer admin"}
        done = await gateway.send("POST", f"/admin/workers/{row['id']}/drain", headers=headers)
        assert done.status == 202
        await gateway.until(lambda: _has_state(gateway, 0, "draining"), "it drains")
        for number in range(5):
            await gateway.chat(f"request {number}")
        assert not stub.seen
        await stub.stop()
        await stub.start()
        await gateway.until(lambda: _has_state(gateway, 0, "ready"), "its next life serves again")
        await stub.stop()


async def test_a_loading_worker_is_unready_and_its_own_words_are_shown() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    stub.kv_problem = 503
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until(lambda: _says_loading(gateway), "the worker's own words are shown")
        assert (await gateway.worker())["state"] == "unready"
        stub.kv_problem = None
        await gateway.until_exact()


async def _says_loading(gateway: GatewayUnderTest) -> bool:
    return "still loading" in (await gateway.worker())["detail"]


@pytest.mark.parametrize(("workers", "gateways", "says", "knowledge"), [
    ("theirs", "ours", "not the gateway's", "none"),
    ("theirs", "", "it has a worker token and the gateway none", "none"),
    ("", "ours", "the gateway has a worker token and it has none", "exact"),
])
async def test_tokens_that_differ_are_named_and_the_worker_serves(workers: str, gateways: str, says: str,
                                                                  knowledge: str) -> None:
    stub = StubWorker(worker_token=workers)
    async with running(stub), running_gateway(stub.url, worker_token=gateways) as gateway:
        async def is_told() -> bool:
            row = await gateway.worker()
            return row["state"] == "ready" and row["knowledge"] == knowledge and says in row["detail"]

        await gateway.until(is_told, "the detail says so")
        for _ in range(2):
            assert (await gateway.chat("How are you today?", stream=True)).status == 200
        assert not any(seen.internal for seen in stub.seen)
        await asyncio.sleep(0.2)  # several polls later
        row = await gateway.worker()
        assert "HEADSTART_WORKER_TOKEN" in row["detail"]
        assert says in row["detail"]
