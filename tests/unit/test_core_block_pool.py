"""The block pool, as stories: ids, reference counts, order of reuse and events after each act."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.core_builders import compute, contents, make_pool, make_scheme
from worker.core import block_content
from worker.core.block_pool import GHOSTS_PER_BLOCK, MAX_BLOCKS_PER_HASH, MAX_PENDING_PER_BLOCK, BlockPool
from worker.protocol.block_hash import ChainHasher, ExtraKey, ExtraKeyKind, block_hashes
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored

SALT_A = (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"a"),)
SALT_B = (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"b"),)


@pytest.fixture
def constant_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant(ChainHasher):
        def append(self, token_ids: Sequence[int]) -> list[int]:
            return [7] * len(super().append(token_ids))

    monkeypatch.setattr(block_content, "ChainHasher", Constant)


def test_the_published_story_of_a_ten_block_pool() -> None:
    """vLLM's test_prefill: 10 usable blocks of 16, a 55-token prompt, then a 53-token prompt with 48 in common.

    vLLM keeps block 0 for padding, so its ids are ours plus one: its free order [5,4,6,7,8,9,10,3,2,1] is this one.
    """
    pool = make_pool(10)
    common = list(range(48))
    first, second = common + [100] * 7, common + [200] * 5

    first_table = compute(pool, contents(first)) + (pool.acquire(1) or [])
    assert first_table == [0, 1, 2, 3]
    assert pool.num_sealed == 3

    found = pool.matchable(contents(second))
    assert found.block_ids == (0, 1, 2)
    assert found.num_idle == 0
    second_table = pool.match(contents(second)) + (pool.acquire(1) or [])
    assert second_table == [0, 1, 2, 4]
    assert [pool.ref_count(block_id) for block_id in range(5)] == [2, 2, 2, 1, 1]

    pool.release(first_table)
    pool.release(second_table)
    assert pool.free_order() == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]

    order = pool.free_order()
    assert pool.acquire(10) == order, "a 160-token miss receives that very order"
    assert pool.num_sealed == 0
    assert pool.num_evictions == 3
    pool.check_invariants()


def test_acquire_is_all_or_nothing() -> None:
    pool = make_pool(4)
    pool.release(compute(pool, contents(list(range(32)))))
    before = pool.free_order()
    assert pool.acquire(5) is None
    assert pool.free_order() == before
    assert pool.num_sealed == 2
    assert pool.acquire(0) == []


def test_a_matched_block_without_holder_counts_as_available_until_it_is_pinned() -> None:
    pool = make_pool(4)
    chain = contents(list(range(32)))
    pool.release(compute(pool, chain))
    assert pool.num_available == 4
    assert pool.matchable(chain).num_idle == 2
    table = pool.match(chain)
    assert pool.num_available == 2
    assert pool.matchable(chain).num_idle == 0
    assert pool.acquire(3) is None, "what a look-up returned is held: nobody can take it"
    assert pool.acquire(2) == [2, 3]
    assert pool.matchable(chain).block_ids == tuple(table)


def test_matchable_reads_only() -> None:
    pool = make_pool(4)
    old, new = contents([1] * 16), contents([2] * 16)
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    before = pool.free_order()
    pool.matchable(old)
    assert pool.free_order() == before, "looking must not refresh"


def test_free_blocks_go_before_any_cached_one() -> None:
    pool = make_pool(3)
    pool.release(compute(pool, contents([1] * 16)))
    unsealed = pool.acquire(1)
    assert unsealed is not None
    pool.release(unsealed)
    assert pool.acquire(2) == [1, 2]
    assert pool.num_evictions == 0
    assert pool.acquire(1) == [0]
    assert pool.num_evictions == 1


def test_the_tail_is_evicted_before_its_root() -> None:
    pool = make_pool(4)
    chain = contents(list(range(64)))
    pool.release(compute(pool, chain))
    for length in (3, 2, 1, 0):
        pool.acquire(1)
        assert len(pool.matchable(chain).block_ids) == length
        pool.check_invariants()


def test_a_shared_root_outlives_both_branches() -> None:
    pool = make_pool(6)
    left, right = contents([0] * 16 + [1] * 32), contents([0] * 16 + [2] * 32)
    tables = compute(pool, left), compute(pool, right)
    for table in tables:
        pool.release(table)
        pool.check_invariants()
    assert pool.free_order() == [5, 2, 1, 4, 3, 0]


def test_a_hit_refreshes_the_whole_chain() -> None:
    pool = make_pool(4)
    old, new = contents([1] * 32), contents([2] * 32)
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    pool.release(pool.match(old))
    assert pool.free_order() == [3, 2, 1, 0]


def test_salts_keep_chains_apart_and_carry_on_down_the_chain() -> None:
    pool = make_pool(9)
    tokens = list(range(32))
    chains = {"none": contents(tokens), "a": contents(tokens, extra_keys=SALT_A),
              "b": contents(tokens, extra_keys=SALT_B)}
    compute(pool, chains["a"])
    assert pool.matchable(chains["a"]).block_ids == (0, 1)
    assert pool.matchable(chains["b"]).block_ids == ()
    assert pool.matchable(chains["none"]).block_ids == ()


@pytest.mark.usefixtures("constant_hash")
@pytest.mark.parametrize(("stored", "asked", "num_hits"), [
    ([1, 1, 2, 2], [1, 1, 2, 2], 2),
    ([1, 1, 2, 2], [1, 1, 3, 3], 1),
    ([1, 1, 2, 2], [3, 3, 2, 2], 0),
    ([1, 1, 2, 2], [2, 2], 0),
    ([1, 1, 1, 1], [1, 1, 1, 1, 1, 1], 2),
])
def test_with_one_hash_for_everything_tokens_and_parent_decide(stored: list[int], asked: list[int],
                                                               num_hits: int) -> None:
    pool = make_pool(8, 2)
    table = compute(pool, contents(stored, 2))
    assert {content.block_hash for content in contents(stored, 2)} == {7}
    assert pool.match(contents(asked, 2)) == table[:num_hits]


@pytest.mark.usefixtures("constant_hash")
def test_with_one_hash_for_everything_extra_keys_decide_too() -> None:
    pool = make_pool(8)
    tokens = list(range(32))
    table = compute(pool, contents(tokens, extra_keys=SALT_A))
    assert pool.matchable(contents(tokens, extra_keys=SALT_B)).block_ids == ()
    assert pool.matchable(contents(tokens)).block_ids == ()
    assert pool.match(contents(tokens, extra_keys=SALT_A)) == table


@pytest.mark.usefixtures("constant_hash")
def test_the_parent_is_an_identity_not_a_content() -> None:
    """Two prefixes that collide and then share a last block: tokens alone would serve the other one's."""
    pool = make_pool(8, 2)
    compute(pool, contents([1, 1, 5, 5], 2))
    other = compute(pool, contents([2, 2], 2))
    assert pool.matchable(contents([2, 2, 5, 5], 2)).block_ids == tuple(other)
    table = compute(pool, contents([2, 2, 5, 5], 2))
    assert table == [2, 3], "its own copy behind its own parent"
    pool.check_invariants()


@pytest.mark.usefixtures("constant_hash")
def test_a_block_stays_private_where_too_many_share_its_hash() -> None:
    pool = make_pool(MAX_BLOCKS_PER_HASH + 1, 2)
    tables = [compute(pool, contents([index, index], 2)) for index in range(MAX_BLOCKS_PER_HASH)]
    extra = pool.acquire(1)
    assert extra is not None
    too_many = contents([99, 99], 2)
    assert pool.seal(extra[0], too_many[0], parent=None) is None
    assert pool.matchable(too_many).block_ids == ()
    pool.check_invariants()
    for table in tables:
        pool.release(table)
    pool.release(extra)
    pool.check_invariants()
    assert pool.free_order()[0] == extra[0]


def test_sealing_what_is_sealed_hands_over_the_first_copy() -> None:
    pool = make_pool(6)
    chain = contents(list(range(32)))
    first = compute(pool, chain)
    mine = pool.acquire(2)
    assert mine == [2, 3]
    assert pool.seal(mine[0], chain[0], parent=None) == first[0]
    assert pool.seal(mine[1], chain[1], parent=first[0]) == first[1]
    assert [pool.ref_count(block_id) for block_id in range(4)] == [2, 2, 0, 0]
    assert pool.num_sealed == 2
    assert pool.free_order()[:2] == [3, 2]
    pool.check_invariants()


def test_a_duplicate_of_an_idle_block_brings_it_back() -> None:
    pool = make_pool(4)
    chain = contents(list(range(16)))
    mine = pool.acquire(1)
    assert mine == [0]
    other = pool.acquire(1)
    assert other == [1]
    assert pool.seal(1, chain[0], parent=None) == 1
    pool.release([1])
    assert pool.num_idle == 1
    assert pool.seal(0, chain[0], parent=None) == 1
    assert (pool.num_idle, pool.ref_count(1), pool.ref_count(0)) == (0, 1, 0)
    pool.check_invariants()


def test_a_seal_is_written_once_behind_a_sealed_parent_by_a_holder() -> None:
    pool = make_pool(4)
    chain = contents(list(range(48)))
    table = compute(pool, chain[:1])
    with pytest.raises(AssertionError, match="write-once"):
        pool.seal(table[0], chain[1], parent=None)
    fresh = pool.acquire(2)
    assert fresh is not None
    with pytest.raises(AssertionError, match="before its parent"):
        pool.seal(fresh[1], chain[2], parent=fresh[0])
    with pytest.raises(AssertionError, match="without its one holder"):
        pool.seal(3, chain[1], parent=table[0])


def test_releasing_what_nobody_holds_is_a_bug() -> None:
    pool = make_pool(2)
    with pytest.raises(AssertionError, match="no holder"):
        pool.release([0])


def test_nothing_is_cached_with_caching_off() -> None:
    pool = make_pool(4, caching=False)
    chain = contents(list(range(16)))
    table = pool.acquire(1)
    assert table is not None
    assert pool.seal(table[0], chain[0], parent=None) is None
    pool.release(table)
    assert pool.match(chain) == []
    assert (pool.num_sealed, pool.num_idle, pool.num_free) == (0, 0, 4)
    assert pool.take_events() == []


def test_events_come_in_order_and_in_runs() -> None:
    pool = make_pool(4)
    tokens = list(range(48))
    hashes = block_hashes(tokens, make_scheme(16))
    table = compute(pool, contents(tokens))
    assert pool.take_events() == [BlockStored(tuple(hashes), None, tuple(tokens), 16)]
    assert pool.take_events() == []

    pool.release(table)
    branch = tokens[:16] + [500] * 32
    compute(pool, contents(branch))
    branch_hashes = block_hashes(branch, make_scheme(16))
    assert pool.take_events() == [
        BlockRemoved((hashes[2],)),
        BlockStored(tuple(branch_hashes[1:]), hashes[0], tuple(branch[16:]), 16),
    ]


def test_chains_that_follow_each_other_are_events_apart() -> None:
    pool = make_pool(6)
    for first in (0, 100, 0):
        compute(pool, contents([*range(first, first + 16), *[pool.num_sealed] * 16]))
    parents = [event.parent_block_hash for event in pool.take_events() if isinstance(event, BlockStored)]
    assert parents == [None, None, contents(list(range(16)))[0].block_hash]


def test_removals_in_a_row_are_one_event() -> None:
    pool = make_pool(3)
    tokens = list(range(48))
    pool.release(compute(pool, contents(tokens)))
    pool.take_events()
    pool.acquire(3)
    assert pool.take_events() == [BlockRemoved(tuple(reversed(block_hashes(tokens, make_scheme(16)))))]


def test_events_carry_extra_keys_per_block_and_none_where_there_are_none() -> None:
    pool = make_pool(4)
    salt_from_20 = (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"a", 20),)
    compute(pool, contents(list(range(48)), extra_keys=salt_from_20))
    (stored,) = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == ((), (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"a", 4),), ())
    assert stored.block_hashes == tuple(block_hashes(list(range(48)), make_scheme(16), salt_from_20))


def test_reset_forgets_the_idle_and_announces_the_held_again() -> None:
    pool = make_pool(6)
    held, idle = list(range(32)), [*range(16), *[7] * 32]
    held_table = compute(pool, contents(held))
    pool.release(compute(pool, contents(idle)))
    pool.reset()
    pool.check_invariants()
    assert (pool.num_idle, pool.num_referenced, pool.num_sealed) == (0, 2, 2)
    assert pool.take_events() == [
        AllBlocksCleared(), BlockStored(tuple(block_hashes(held, make_scheme(16))), None, tuple(held), 16)]
    assert pool.num_evictions == 0
    assert pool.matchable(contents(idle)).block_ids == (held_table[0],)
    pool.release(held_table)
    pool.reset()
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.num_free == 6


def test_events_that_nobody_takes_are_bounded() -> None:
    pool = make_pool(2)
    for index in range(MAX_PENDING_PER_BLOCK * 3):
        pool.release(compute(pool, contents([index] * 16)))
    events = pool.take_events()
    assert isinstance(events[0], AllBlocksCleared)
    assert sum(len(event.block_hashes) for event in events[1:]) <= MAX_PENDING_PER_BLOCK * 2 + 1
    alive: set[int] = set()
    for event in events[1:]:
        (alive.update if isinstance(event, BlockStored) else alive.difference_update)(event.block_hashes)
    last = MAX_PENDING_PER_BLOCK * 3 - 1
    assert alive == {contents([index] * 16)[0].block_hash for index in (last - 1, last)}


def test_tokens_computed_again_after_their_eviction_are_counted() -> None:
    pool = make_pool(2)
    chain, other = contents([1] * 32), contents([2] * 32)
    pool.release(compute(pool, chain))
    pool.release(compute(pool, other))
    assert (pool.num_evictions, pool.num_recomputed_evicted_tokens) == (2, 0)
    pool.release(compute(pool, chain))
    assert pool.num_recomputed_evicted_tokens == 32
    pool.forgive(other)
    pool.release(compute(pool, other))
    assert pool.num_recomputed_evicted_tokens == 32, "forgiven: somebody else counts it"


def test_ghosts_are_bounded() -> None:
    pool = make_pool(1)
    first = contents([1000] * 16)
    pool.release(compute(pool, first))
    for index in range(GHOSTS_PER_BLOCK + 1):
        pool.release(compute(pool, contents([index] * 16)))
    pool.release(compute(pool, first))
    assert pool.num_recomputed_evicted_tokens == 0, "forgotten as a ghost too"


@pytest.mark.parametrize(("num_blocks", "block_size", "complaint"),
                         [(0, 16, "num_blocks is 0"), (4, 8, "block_size is 8")])
def test_nonsense_is_refused_by_name(num_blocks: int, block_size: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BlockPool(num_blocks, block_size, make_scheme(16))
