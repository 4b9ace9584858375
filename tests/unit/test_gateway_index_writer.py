"""The index writer: changes land in order, spread over turns of the loop, and what is gone is gone at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from gateway.knowledge.index_writer import IndexWriter, NumberedBatch
from gateway.routing.prefix_index import Match, PrefixIndex
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

SCHEME = HashScheme(block_size=4, seed=b"seed", model="m", weights="w", tokenizer="t", template="",
                    kv_dtype="float32", exactness="strict")


@asynccontextmanager
async def running() -> AsyncIterator[tuple[PrefixIndex, IndexWriter]]:
    index = PrefixIndex(1 << 40)
    writer = IndexWriter(index)
    task = asyncio.create_task(writer.run())
    try:
        yield index, writer
    finally:
        task.cancel()


async def until_swept(index: PrefixIndex, num_blocks: int) -> None:
    for _ in range(10_000):
        if index.num_blocks() == num_blocks:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{index.num_blocks()} blocks stay")


async def until_any(index: PrefixIndex, endpoint_id: str) -> None:
    for _ in range(10_000):
        if index.num_blocks(endpoint_id):
            return
        await asyncio.sleep(0)
    raise AssertionError("no block came")


def chain(num_blocks: int) -> tuple[list[int], BlockStored]:
    tokens = range(num_blocks * 4)
    own = block_hashes(tokens, SCHEME)
    return own, BlockStored(tuple(own), None, tuple(tokens), 4)


async def test_a_large_store_leaves_the_loop_to_others_in_between() -> None:
    async with running() as (index, writer):
        own, event = chain(20_000)
        seen: set[int] = set()

        async def watch() -> None:
            while True:
                seen.add(index.num_blocks("a"))
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        await writer.restart("a", SCHEME, "boot-1", [event])
        watcher.cancel()
        assert index.match(own, 0.0) == {"a": Match(20_000, 0)}
        assert len(seen) > 10, "it was stored in a few long turns"


async def test_many_small_changes_leave_the_loop_to_others_in_between() -> None:
    async with running() as (index, writer):
        own, _ = chain(600)
        await asyncio.gather(*[writer.restart(f"w{number}", SCHEME, "boot-1", []) for number in range(20)])
        events = [BlockStored((own[at],), own[at - 1] if at else None, tuple(range(4 * at, 4 * at + 4)), 4)
                  for at in range(len(own))]
        turns = 0

        async def watch() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*[writer.apply(f"w{number}", [NumberedBatch(0, EventBatch(0.0, [*events]))])
                               for number in range(20)])
        watcher.cancel()
        assert index.match(own, 0.0) == {f"w{number}": Match(600, 0) for number in range(20)}
        assert turns > 10


async def test_who_is_forgotten_matches_nothing_and_is_swept_away_later() -> None:
    async with running() as (index, writer):
        own, event = chain(5_000)
        await writer.restart("a", SCHEME, "boot-1", [event])
        await writer.forget("a")
        assert index.match(own, 0.0) == {}
        await until_swept(index, 0)
        index.check_invariants()


async def test_a_snapshot_replaces_what_was_believed_while_the_old_blocks_are_still_there() -> None:
    async with running() as (index, writer):
        own, event = chain(5_000)
        _, shorter = chain(3)
        await writer.restart("a", SCHEME, "boot-1", [event])
        await writer.restart("a", SCHEME, "boot-2", [shorter])
        assert index.match(own, 0.0) == {"a": Match(3, 0)}
        await writer.apply("a", [NumberedBatch(0, EventBatch(0.0, [BlockRemoved((own[2],))], epoch="boot-2")),
                                 NumberedBatch(1, EventBatch(0.0, [BlockRemoved((own[1],))], epoch="boot-1"))])
        assert index.match(own, 0.0) == {"a": Match(2, 0)}
        assert writer.counts("a").num_other_epoch == 1
        await until_swept(index, 2)


def is_done_at_once(change: Coroutine[None, None, None]) -> bool:
    try:
        change.send(None)
    except StopIteration:
        return True
    change.close()
    return False


async def test_a_small_change_is_made_at_once_unless_another_is_before_it() -> None:
    async with running() as (index, writer):
        own, event = chain(20_000)
        small = [NumberedBatch(0, EventBatch(0.0, [BlockStored((own[0],), None, tuple(range(4)), 4)]))]
        await asyncio.gather(writer.restart("a", SCHEME, "boot-1", []), writer.restart("b", SCHEME, "boot-1", []))
        assert is_done_at_once(writer.apply("a", small))
        assert index.match(own, 0.0) == {"a": Match(1, 0)}
        assert not is_done_at_once(writer.apply("b", [NumberedBatch(0, EventBatch(0.0, [event]))])), "it is large"
        assert not is_done_at_once(writer.apply("a", small)), "another is queued"
        assert not is_done_at_once(writer.apply("a", [NumberedBatch(1, EventBatch(0.0, [AllBlocksCleared()]))]))
        restarting = asyncio.create_task(writer.restart("c", SCHEME, "boot-1", [event]))
        await until_any(index, "c")
        assert not is_done_at_once(writer.apply("a", small)), "another is under way"
        await restarting
        assert index.match(own, 0.0)["c"] == Match(20_000, 0)


async def test_small_changes_of_many_are_all_made_in_order() -> None:
    async with running() as (index, writer):
        own, _ = chain(8)
        names = [f"w{number}" for number in range(100)]
        await asyncio.gather(*[writer.restart(name, SCHEME, "boot-1", []) for name in names])

        async def feed(name: str) -> None:
            for at in range(8):
                event = BlockStored((own[at],), own[at - 1] if at else None, tuple(range(4 * at, 4 * at + 4)), 4)
                await writer.apply(name, [NumberedBatch(at, EventBatch(0.0, [event]))])

        await asyncio.gather(*map(feed, names))
        assert index.match(own, 0.0) == dict.fromkeys(names, Match(8, 0))
