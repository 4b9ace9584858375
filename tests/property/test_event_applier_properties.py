"""Event applier and index together against a model of engines that hash in their own way.

Two engines share the index: one names blocks as we do, one by a numbering of its own. The model knows token
prefixes only.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.routing.event_applier import EventApplier
from gateway.routing.prefix_index import PrefixIndex
from tests.support.routing_chains import Path, paths, prefixes_of
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EventBatch

BLOCK_SIZE = 2
SCHEME = HashScheme(block_size=BLOCK_SIZE, seed=b"seed", model="m", weights="w", tokenizer="t", template="",
                    kv_dtype="float32", exactness="strict")
ALIKE, FOREIGN = "alike", "foreign"
TIERS = ("GPU", "CPU")

engines = st.sampled_from([ALIKE, FOREIGN])
tiers = st.sampled_from(TIERS)


def tokens_of(path: Path) -> list[int]:
    return [token for step in path for token in (step, step + 100)]


def own_hashes(path: Path) -> list[int]:
    return block_hashes(tokens_of(path), SCHEME)


class EventApplierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1 << 40)
        self.appliers = {name: EventApplier(self.index, name, SCHEME, "boot-1") for name in (ALIKE, FOREIGN)}
        self.held: dict[tuple[str, str], Counter[Path]] = {}
        self.numbers: dict[Path, int] = {}
        self.asked: set[Path] = set()

    @initialize()
    def start(self) -> None:
        for engine in (ALIKE, FOREIGN):
            for tier in TIERS:
                self.held[engine, tier] = Counter()

    def engine_hash(self, engine: str, path: Path) -> int:
        return own_hashes(path)[-1] if engine == ALIKE else self.numbers.setdefault(path, len(self.numbers))

    def blocks_of(self, engine: str) -> set[Path]:
        return {path for tier in TIERS for path, count in self.held[engine, tier].items() if count}

    def send(self, engine: str, event: CacheEvent) -> None:
        self.appliers[engine].apply(EventBatch(0.0, [event], epoch="boot-1"))

    @rule(engine=engines, path=paths, start=st.integers(0, 5), tier=tiers)
    def store(self, engine: str, path: Path, start: int, tier: str) -> None:
        start = min(start, len(path) - 1)
        parent, stored = path[:start], prefixes_of(path)[start:]
        self.asked.add(path)
        self.send(engine, BlockStored(
            tuple(self.engine_hash(engine, block) for block in stored),
            self.engine_hash(engine, parent) if parent else None, tuple(tokens_of(path[start:])), BLOCK_SIZE,
            medium=tier))
        if not parent or parent in self.blocks_of(engine):
            self.held[engine, tier].update(stored)

    @rule(engine=engines, streams=st.lists(paths, min_size=1, max_size=24),
          tier=st.sampled_from(("GPU", "GPU", "CPU")))
    def decode(self, engine: str, streams: list[Path], tier: str) -> None:
        """One block an event, many events a batch: whether they are looked at together is nobody's business."""
        streams = [path for path in streams if len(path) > 1]
        self.asked.update(streams)
        self.appliers[engine].apply(EventBatch(0.0, [BlockStored(
            (self.engine_hash(engine, path),), self.engine_hash(engine, path[:-1]), tuple(tokens_of(path[-1:])),
            BLOCK_SIZE, medium=tier) for path in streams], epoch="boot-1"))
        for path in streams:
            if path[:-1] in self.blocks_of(engine):
                self.held[engine, tier][path] += 1

    @rule(engine=engines, victims=st.lists(paths, min_size=1, max_size=3), tier=tiers)
    def remove(self, engine: str, victims: list[Path], tier: str) -> None:
        self.send(engine, BlockRemoved(tuple(self.engine_hash(engine, path) for path in victims), medium=tier))
        for path in victims:
            if self.held[engine, tier][path]:
                self.held[engine, tier][path] -= 1

    @rule(engine=engines, tier=tiers, data=st.data())
    def remove_held(self, engine: str, tier: str, data: st.DataObject) -> None:
        if held := sorted(+self.held[engine, tier]):
            self.remove(engine, data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=5)), tier)

    @rule(engine=engines)
    def clear(self, engine: str) -> None:
        self.send(engine, AllBlocksCleared())
        for tier in TIERS:
            self.held[engine, tier].clear()

    @rule(engine=engines)
    def batch_of_an_earlier_life(self, engine: str) -> None:
        self.appliers[engine].apply(EventBatch(0.0, [AllBlocksCleared()], epoch="boot-0"), 7)

    @invariant()
    def index_knows_what_the_engines_hold(self) -> None:
        self.index.check_invariants()
        for path in sorted(self.asked):
            expected = {}
            for engine in (ALIKE, FOREIGN):
                held, length = self.blocks_of(engine), 0
                while path[:length + 1] in held and length < len(path):
                    length += 1
                if length:
                    expected[engine] = (length, 0)
            matches = self.index.match(own_hashes(path), 0.0)
            assert {engine: match[:2] for engine, match in matches.items()} == expected

    @invariant()
    def handles_are_kept_only_where_needed(self) -> None:
        if self.held:
            assert self.appliers[ALIKE].num_handles == 0
            assert self.appliers[FOREIGN].num_handles == len(self.blocks_of(FOREIGN))
            assert self.index.num_blocks(FOREIGN) == len(self.blocks_of(FOREIGN))


TestEventApplierMachine = EventApplierMachine.TestCase
TestEventApplierMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
