"""The event applier by example; equality with a naive model is in tests/property/test_event_applier_properties.py."""

from __future__ import annotations

import pytest

from gateway.routing.block_tree import ROW_BYTES
from gateway.routing.event_applier import AppliedCounts, EventApplier
from gateway.routing.holder_sets import SET_BYTES
from gateway.routing.prefix_index import LEAF_BYTES, Match, PrefixIndex
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, HashScheme, block_hashes
from worker.protocol.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EventBatch,
    decode_batch,
    encode_batch,
)

SCHEME = HashScheme(block_size=4, seed=b"seed", model="m", weights="w", tokenizer="t", template="",
                    kv_dtype="float32", exactness="strict")
TOKENS = tuple(range(100, 124))
OWN = block_hashes(TOKENS, SCHEME)
ENGINE = (1, 2, 3, 4, 5, 6)


class Worker:
    """An index, and an applier for one endpoint called "a"."""

    def __init__(self, max_bytes: int = 1 << 40) -> None:
        self.index = PrefixIndex(max_bytes)
        self.applier = EventApplier(self.index, "a", SCHEME, "boot-1")

    def send(self, *events: CacheEvent) -> AppliedCounts:
        self.applier.apply(decode_batch(encode_batch(list(events), ts=0.0, dp_rank=None, epoch="boot-1")), 1)
        self.index.check_invariants()
        return self.applier.counts

    def match(self, hashes: list[int] = OWN) -> Match | None:
        return self.index.match(hashes, 0.0).get("a")


def stored(first: int, last: int, *, hashes: tuple[int, ...] = ENGINE, **rest: object) -> BlockStored:
    """Blocks first..last-1 of TOKENS, named by `hashes`."""
    rest.setdefault("block_size", 4)
    return BlockStored(block_hashes=hashes[first:last], parent_block_hash=hashes[first - 1] if first else None,
                       token_ids=TOKENS[4 * first:4 * last], **rest)  # type: ignore[arg-type]


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.mark.parametrize("hashes", [ENGINE, tuple(OWN)], ids=["its own hashes", "our hashes"])
def test_a_chain_grows_and_shrinks(worker: Worker, hashes: tuple[int, ...]) -> None:
    counts = worker.send(stored(0, 2, hashes=hashes), stored(2, 6, hashes=hashes))
    assert worker.match() == Match(6, 0)
    worker.send(BlockRemoved(hashes[4:]))
    assert worker.match() == Match(4, 0)
    worker.send(BlockRemoved(hashes[:4]))
    assert worker.match() is None
    assert counts == AppliedCounts(num_stored=6, num_removed=6)
    assert worker.applier.num_handles == worker.applier.memory_bytes() == 0


def test_our_own_hashes_need_no_handles(worker: Worker) -> None:
    worker.send(stored(0, 6, hashes=tuple(OWN)))
    assert worker.applier.num_handles == 0
    worker.send(stored(0, 6))
    assert worker.applier.num_handles == 6


def test_the_engine_hash_is_not_believed(worker: Worker) -> None:
    worker.send(BlockStored(tuple(OWN[:2]), None, tuple(range(8)), 4))
    assert worker.match() is None
    assert worker.match(block_hashes(range(8), SCHEME)) == Match(2, 0)


def test_an_unknown_parent_makes_orphans(worker: Worker) -> None:
    counts = worker.send(stored(2, 6))
    assert (counts.num_orphans, counts.num_stored) == (4, 0)
    assert worker.match() is None
    assert worker.index.num_blocks() == 0


def test_duplicate_stores_need_as_many_removals(worker: Worker) -> None:
    counts = worker.send(stored(0, 2), stored(0, 2), BlockRemoved((2,)))
    assert worker.match() == Match(2, 0)
    worker.send(BlockRemoved((2,)), BlockRemoved((2,)))
    assert worker.match() == Match(1, 0)
    assert (counts.num_removed, counts.num_unknown_removed) == (2, 1)
    worker.send(stored(0, 2))
    assert worker.match() == Match(2, 0)


def test_tiers_are_counted_apart_and_named_in_any_case(worker: Worker) -> None:
    worker.send(stored(0, 2, medium="GPU"), stored(0, 2, medium="cpu"), BlockRemoved((1, 2), medium="gpu"))
    assert worker.match() == Match(2, 0, slow_blocks=2)
    counts = worker.send(BlockRemoved((1,), medium="gpu"))
    assert counts.num_unknown_removed == 1
    worker.send(BlockRemoved((2, 1), medium="CPU"))
    assert worker.match() is None
    assert worker.applier.num_handles == 0


def test_everything_cleared(worker: Worker) -> None:
    worker.send(stored(0, 6))
    worker.index.store("b", OWN)
    counts = worker.send(AllBlocksCleared())
    assert worker.index.match(OWN, 0.0) == {"b": Match(6, 0)}
    assert (counts.num_cleared, worker.applier.num_handles) == (1, 0)
    worker.send(stored(0, 6))
    assert worker.match() == Match(6, 0)


def test_a_batch_of_another_life_is_ignored(worker: Worker) -> None:
    worker.send(stored(0, 2))
    worker.applier.apply(EventBatch(0.0, [AllBlocksCleared()], epoch="boot-0"), 9)
    assert worker.match() == Match(2, 0)
    assert (worker.applier.counts.num_other_epoch, worker.applier.last_seq) == (1, 1)
    worker.applier.apply(EventBatch(0.0, [AllBlocksCleared()]), 2)
    assert worker.match() is None
    assert worker.applier.last_seq == 2


def test_another_block_size_is_counted_and_shown(worker: Worker) -> None:
    counts = worker.send(BlockStored((1,), None, tuple(range(8)), 8))
    assert (counts.num_wrong_block_size, worker.applier.event_block_size) == (1, 8)
    assert worker.index.num_blocks() == 0


def test_other_groups_are_counted(worker: Worker) -> None:
    counts = worker.send(stored(0, 2, group_idx=1), BlockRemoved((1,), group_idx=1), stored(0, 2, group_idx=0))
    assert counts.num_other_group == 3
    assert worker.match() == Match(2, 0)


@pytest.mark.parametrize("event", [
    BlockStored((1, 2), None, tuple(range(7)), 4),
    BlockStored((1,), None, tuple(range(8)), 4),
    BlockStored((1, 2), None, tuple(range(8)), 4, extra_keys=((ExtraKey(2, b"x"),),)),
], ids=["too few tokens", "too many tokens", "keys for one block of two"])
def test_a_malformed_store_changes_nothing(worker: Worker, event: BlockStored) -> None:
    worker.applier.apply_events([event])
    assert worker.applier.counts.num_malformed == len(event.block_hashes)
    assert worker.index.num_blocks() == 0


def test_an_empty_store_changes_nothing(worker: Worker) -> None:
    worker.applier.apply_events([BlockStored((), None, (), 4), BlockRemoved(())])
    assert worker.applier.counts == AppliedCounts()


def test_extra_keys_enter_the_chain(worker: Worker) -> None:
    salt = ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"tenant", 5)
    keys = ((), (salt._replace(start=1),), (), (), (), ())
    worker.send(stored(0, 3, extra_keys=keys[:3]), stored(3, 6, extra_keys=keys[3:]))
    assert worker.match(block_hashes(TOKENS, SCHEME, [salt])) == Match(6, 0)
    assert worker.match() == Match(1, 0)


@pytest.mark.parametrize("foreign", [
    {"foreign_extra_keys": (["lora-name"], None)}, {"lora_name": "x"}, {"lora_id": 3}, {"cache_salt": "s"}])
def test_blocks_hashed_by_what_we_do_not_know_match_nothing_of_ours(
        worker: Worker, foreign: dict[str, object]) -> None:
    worker.applier.apply_events([stored(0, 2, **foreign), stored(2, 6)])
    assert worker.match() is None
    assert worker.index.num_blocks("a") == 6
    assert worker.applier.counts.num_orphans == 0
    worker.applier.apply_events([BlockRemoved(ENGINE)])
    assert worker.index.num_blocks("a") == 0


def test_an_engine_hash_that_names_other_content_now(worker: Worker) -> None:
    worker.send(BlockStored((1,), None, TOKENS[:4], 4), BlockStored((1,), None, (7, 7, 7, 7), 4))
    assert worker.match() is None
    assert worker.match(block_hashes((7, 7, 7, 7), SCHEME)) == Match(1, 0)
    worker.send(BlockRemoved((1,)))
    assert worker.index.num_blocks() == 0


def test_a_full_index_refuses_what_follows_a_dropped_block_and_handles_go_on_removal() -> None:
    worker = Worker(max_bytes=3 * ROW_BYTES + LEAF_BYTES + 3 * SET_BYTES)
    counts = worker.send(stored(0, 4), stored(4, 6))
    assert counts.num_refused == 2
    assert worker.match() is not None
    worker.send(BlockRemoved(ENGINE))
    assert worker.match() is None
    assert worker.applier.num_handles == 0


def test_reset_forgets_the_endpoint(worker: Worker) -> None:
    worker.send(stored(0, 6))
    worker.index.speculate("a", [*OWN, 99], 5.0)
    worker.applier.reset()
    assert worker.match() is None
    assert worker.applier.num_handles == 0
