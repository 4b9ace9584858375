"""Micro-benchmark of routing: match, store, speculate, purge, pick.

    python -m loadtests.bench.routing
    python -m loadtests.bench.routing --json

Owns nothing but its workload, which is seeded. Figures are the fastest of several rounds, in CPU
time of this thread: what the code costs, not what else the machine was doing.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import orjson

from gateway.routing.endpoint import EndpointView
from gateway.routing.event_applier import EventApplier
from gateway.routing.load_ledger import LoadView
from gateway.routing.picker import PickInput, pick
from gateway.routing.prefix_index import Match, PrefixIndex
from loadtests.bench.full_fleet import full_fleet
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.cache_events import BlockStored, EventBatch

NUM_ENDPOINTS = 64
NUM_BLOCKS = 2000
BLOCK_SIZE = 16
ROUNDS = 15
ROOMY_BYTES = 1 << 34
SEED = 7
SCHEME = HashScheme(block_size=BLOCK_SIZE, seed=b"bench", model="m", weights="w", tokenizer="t", template="",
                    kv_dtype="bfloat16", exactness="fast")


class Figure(NamedTuple):
    """One line of the table; `goal` where the project states one."""

    name: str
    value: float
    unit: str
    goal: float | None = None


def best_us(work: Callable[[], object], *, per: int = 1, prepare: Callable[[], None] | None = None) -> float:
    """CPU microseconds of `work`, divided by `per`: the fastest round, since noise only ever adds."""
    times = []
    for _ in range(ROUNDS):
        if prepare is not None:
            prepare()
        start = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - start)
    return min(times) / 1000 / per


def hashes(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def names() -> list[str]:
    return [f"worker-{number}" for number in range(NUM_ENDPOINTS)]


def match_figures(rng: random.Random) -> Iterator[Figure]:
    chain, same, apart = hashes(rng, NUM_BLOCKS), PrefixIndex(ROOMY_BYTES), PrefixIndex(ROOMY_BYTES)
    for number, name in enumerate(names()):
        same.store(name, chain)
        apart.store(name, chain[:NUM_BLOCKS * (number + 1) // NUM_ENDPOINTS])
    title = f"match {NUM_BLOCKS} blocks, {NUM_ENDPOINTS} endpoints"
    yield Figure(f"{title}, one depth", _match_us(same, chain), "us", 5.0)
    yield Figure(f"{title}, {NUM_ENDPOINTS} depths", _match_us(apart, chain), "us", 40.0)
    same.remove("worker-0", chain[NUM_BLOCKS // 2:][:1])
    yield Figure(f"{title}, one with a hole", _match_us(same, chain), "us", 40.0)
    yield Figure("match of an unknown prompt", _match_us(same, hashes(rng, NUM_BLOCKS)), "us")


def _match_us(index: PrefixIndex, chain: list[int]) -> float:
    def work() -> None:
        for _ in range(50):
            index.match(chain, 0.0)

    return best_us(work, per=50)


def event_figures(rng: random.Random) -> Iterator[Figure]:
    for length in (16, 1):
        yield Figure(f"store new blocks, {length} an event", _store_us(rng, length), "us/block", 0.7)
    index = PrefixIndex(ROOMY_BYTES)
    chain = hashes(rng, NUM_BLOCKS)
    index.store("a", chain)
    others = (f"other-{number}" for number in range(ROUNDS))
    yield Figure("store what another endpoint holds, one event",
                 best_us(lambda: index.store(next(others), chain), per=NUM_BLOCKS), "us/block", 0.7)
    yield Figure("remove, tail first", best_us(lambda: index.remove("a", reversed(chain)), per=NUM_BLOCKS,
                                               prepare=lambda: _again(index, chain)), "us/block")
    title = "event applier (hash and store)"
    yield Figure(f"{title}, 16 blocks an event", _apply_us(rng, length=16), "us/block", 0.7)
    for num_streams in (1, 16, 64):
        yield Figure(f"{title}, batches of {num_streams} of 1 block", _apply_us(rng, num_streams=num_streams),
                     "us/block", 0.7)


def _again(index: PrefixIndex, chain: list[int]) -> None:
    index.purge("a")
    index.store("a", chain)


def _store_us(rng: random.Random, length: int) -> float:
    index = PrefixIndex(ROOMY_BYTES)
    chain: list[int] = []

    def prepare() -> None:
        chain[:] = hashes(rng, NUM_BLOCKS)

    def work() -> None:
        parent = None
        for start in range(0, NUM_BLOCKS, length):
            piece = chain[start:start + length]
            index.store("a", piece, parent=parent)
            parent = piece[-1]

    return best_us(work, per=NUM_BLOCKS, prepare=prepare)


def _apply_us(rng: random.Random, *, length: int = 1, num_streams: int = 1) -> float:
    """A batch has an event of so many blocks for each of the streams."""
    index = PrefixIndex(ROOMY_BYTES)
    applier = EventApplier(index, "a", SCHEME)
    streams = [[*_events(rng, length)] for _ in range(num_streams)]
    batches = [EventBatch(0.0, list(events)) for events in zip(*streams, strict=True)]
    batches = batches[:NUM_BLOCKS // (length * num_streams)]

    def work() -> None:
        for batch in batches:
            applier.apply(batch)

    return best_us(work, per=sum(len(batch.events) for batch in batches) * length, prepare=lambda: index.purge("a"))


def _events(rng: random.Random, length: int) -> Iterator[BlockStored]:
    token_ids = [rng.randrange(100_000) for _ in range(NUM_BLOCKS * BLOCK_SIZE)]
    chain = block_hashes(token_ids, SCHEME)
    for at in range(0, NUM_BLOCKS, length):
        yield BlockStored(tuple(chain[at:at + length]), chain[at - 1] if at else None,
                          tuple(token_ids[at * BLOCK_SIZE:(at + length) * BLOCK_SIZE]), BLOCK_SIZE)


def booking_figures(rng: random.Random) -> Iterator[Figure]:
    index = PrefixIndex(ROOMY_BYTES)
    warm, cold = hashes(rng, 375), hashes(rng, 375)
    index.store("a", warm)
    yield Figure("speculate on a 6k-token prompt, all held already",
                 best_us(lambda: index.withdraw(index.speculate("a", warm, 1.0))), "us")
    yield Figure("speculate and withdraw, 375 new blocks",
                 best_us(lambda: index.withdraw(index.speculate("a", cold, 1.0))), "us")


def purge_figure(rng: random.Random) -> Figure:
    index = PrefixIndex(ROOMY_BYTES)
    chains = [hashes(rng, NUM_BLOCKS) for _ in range(50)]

    def prepare() -> None:
        for chain in chains:
            index.store("a", chain)

    num_blocks = NUM_BLOCKS * len(chains)
    return Figure(f"purge of {num_blocks} blocks", best_us(lambda: index.purge("a"), per=num_blocks, prepare=prepare),
                  "us/block")


def pick_figure(rng: random.Random) -> Figure:
    endpoints = [EndpointView(name, "1", prefill_tokens_per_s=4000.0, decode_step_s=0.02, blocks_total=10_000,
                              blocks_free=rng.randrange(10_000), blocks_cached=500, num_running=rng.randrange(8))
                 for name in names()]
    loads = {name: LoadView(rng.randrange(8), rng.randrange(4000), rng.randrange(9000)) for name in names()}
    matches = {name: Match(rng.randrange(400), 0) for name in names()}
    given = PickInput(endpoints, 6000, matches=matches, loads=loads, random_ratio=0.5)
    return Figure(f"pick, {NUM_ENDPOINTS} endpoints", best_us(lambda: pick(given)), "us", 60.0)


def full_pick_figure(rng: random.Random, num_endpoints: int, *, num_fleets: int, goal: float) -> Figure:
    fleets = [full_fleet(rng, num_endpoints) for _ in range(num_fleets)]
    return Figure(f"pick, {num_endpoints} endpoints, all full", best_us(lambda: [pick(fleet) for fleet in fleets],
                                                                        per=num_fleets), "us", goal)


def memory_figures(rng: random.Random) -> Iterator[Figure]:
    for num_sharers in (1, 8):
        gc.collect()
        tracemalloc.start()
        index = PrefixIndex(ROOMY_BYTES)
        for _ in range(50):
            chain = hashes(rng, NUM_BLOCKS)
            for number in range(num_sharers):
                index.store(f"e{number}", chain)
        del chain
        measured, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        claims = 50 * NUM_BLOCKS * num_sharers
        yield Figure(f"memory, {num_sharers} endpoints a block", measured / claims, "B/claim", 64.0)
        yield Figure("  as memory_bytes() says", index.memory_bytes() / claims, "B/claim")


def figures() -> list[Figure]:
    rng = random.Random(SEED)
    return [*match_figures(rng), *event_figures(rng), *booking_figures(rng), purge_figure(rng), pick_figure(rng),
            full_pick_figure(rng, NUM_ENDPOINTS, num_fleets=8, goal=300.0),
            full_pick_figure(rng, 1000, num_fleets=1, goal=3000.0), *memory_figures(rng)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.routing",
                                     description="Micro-benchmark of routing: match, store, speculate, purge, pick.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    measured = figures()
    if arguments.json:
        print(orjson.dumps({"seed": SEED, "figures": [figure._asdict() for figure in measured]}).decode())
        return
    for figure in measured:
        goal = f"   goal {figure.goal:g}" if figure.goal is not None else ""
        print(f"{figure.name:<58}{figure.value:>10.2f} {figure.unit}{goal}")


if __name__ == "__main__":
    main()
