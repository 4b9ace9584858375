"""The mirror equals a naive replay of the events, and lists parents before children whatever the order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.block_hash import ExtraKey, ExtraKeyKind
from worker.protocol.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from worker.server.block_mirror import BlockMirror

BLOCK_SIZE = 2
HASHES = st.integers(1, 12)


def stored(hashes: tuple[int, ...], parent: int | None) -> BlockStored:
    token_ids = tuple(token for value in hashes for token in (value, value))
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=token_ids, block_size=BLOCK_SIZE)


EVENTS = st.one_of(
    st.builds(stored, st.lists(HASHES, min_size=1, max_size=4, unique=True).map(tuple), st.none() | HASHES),
    st.builds(lambda hashes: BlockRemoved(block_hashes=tuple(hashes)), st.lists(HASHES, min_size=1, max_size=4)),
    st.just(AllBlocksCleared()),
)


def naive(events: list[CacheEvent]) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held = {}
        elif isinstance(event, BlockRemoved):
            held = {value: block for value, block in held.items() if value not in event.block_hashes}
        else:
            parents = (event.parent_block_hash, *event.block_hashes)
            for parent, value in zip(parents, event.block_hashes, strict=False):
                held[value] = (parent, (value, value))
    return held


@given(st.lists(EVENTS, max_size=30))
def test_content_equals_the_naive_replay(events: list[CacheEvent]) -> None:
    mirror = BlockMirror()
    mirror.apply(events)
    blocks = mirror.blocks()
    assert {block.block_hashes[0]: (block.parent_block_hash, block.token_ids) for block in blocks} == naive(events)
    assert len(blocks) == len(mirror)


@given(st.lists(EVENTS, max_size=30))
def test_a_reader_of_the_list_ends_with_the_same_mirror(events: list[CacheEvent]) -> None:
    mirror, reader = BlockMirror(), BlockMirror()
    mirror.apply(events)
    reader.apply(mirror.blocks())
    expected = sorted(block.block_hashes for block in mirror.blocks())
    assert sorted(block.block_hashes for block in reader.blocks()) == expected


def test_parents_come_first_also_when_they_were_stored_again_later() -> None:
    mirror = BlockMirror()
    mirror.apply([stored((1, 2, 3), None), BlockRemoved(block_hashes=(1,)), stored((1,), None)])
    assert [block.block_hashes[0] for block in mirror.blocks()] == [1, 2, 3]


def test_an_orphan_is_listed_with_its_missing_parent_named() -> None:
    mirror = BlockMirror()
    mirror.apply([stored((1, 2), None), BlockRemoved(block_hashes=(1,))])
    assert [(block.block_hashes[0], block.parent_block_hash) for block in mirror.blocks()] == [(2, 1)]


def test_a_block_keeps_its_own_extra_keys_only() -> None:
    salt = ExtraKey(ExtraKeyKind.BODY_SALT, b"s", 0)
    event = BlockStored(block_hashes=(1, 2), parent_block_hash=None, token_ids=(1, 1, 2, 2), block_size=BLOCK_SIZE,
                        extra_keys=((salt,), ()))
    mirror = BlockMirror()
    mirror.apply([event])
    assert [block.extra_keys for block in mirror.blocks()] == [((salt,),), ()]


def test_removing_an_unknown_block_is_harmless() -> None:
    mirror = BlockMirror()
    mirror.apply([BlockRemoved(block_hashes=(7,))])
    assert len(mirror) == 0
    assert 7 not in mirror
