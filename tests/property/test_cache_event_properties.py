"""Events and snapshots come back as they were sent, whatever they hold and however the bytes are cut."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.block_hash import ExtraKey
from worker.protocol.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEventError,
    SnapshotHeader,
    SnapshotReader,
    decode_batch,
    encode_batch,
    encode_snapshot_block,
    encode_snapshot_header,
)

hashes = st.integers(0, 2**64 - 1)
keys = st.builds(ExtraKey, st.integers(1, 255), st.binary(max_size=8), st.integers(0, 2**32 - 1))


@st.composite
def stored_events(draw: st.DrawFn, block_size: int | None = None) -> BlockStored:
    size = block_size or draw(st.integers(1, 5))
    count = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * count, max_size=size * count))
    extra = draw(st.just([]) | st.lists(st.lists(keys, max_size=2).map(tuple), min_size=count, max_size=count))
    return BlockStored(
        tuple(draw(st.lists(hashes, min_size=count, max_size=count))), draw(st.none() | hashes), tuple(tokens), size,
        tuple(extra), medium=draw(st.sampled_from(["GPU", "CPU"])), group_idx=draw(st.none() | st.integers(0, 3)))


events = st.one_of(stored_events(), st.builds(BlockRemoved, st.lists(hashes, max_size=3).map(tuple)),
                   st.builds(AllBlocksCleared))


@given(st.lists(events, max_size=5), st.none() | st.integers(0, 9), st.floats(allow_nan=False))
def test_a_batch_round_trips(sent: list[object], dp_rank: int | None, ts: float) -> None:
    batch = decode_batch(encode_batch(sent, ts=ts, dp_rank=dp_rank))  # type: ignore[arg-type]
    assert batch == (ts, sent, dp_rank, None, 0)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(raw: bytes) -> None:
    with contextlib.suppress(CacheEventError):
        decode_batch(raw)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=40)
json_like = scalars | st.lists(scalars, max_size=3) | st.lists(st.lists(scalars, max_size=3), max_size=2)
FIELDS = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "medium", "group_idx",
          "lora_id", "lora_name", "cache_salt", "epoch", "foreign_extra_keys"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_like), st.sampled_from(["BlockStored", "BlockRemoved", "Other"]))
def test_any_map_is_an_event_that_fits_or_is_counted(fields: dict[str, object], tag: str) -> None:
    base = {"type": tag, "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    batch = decode_batch(msgspec.msgpack.encode([0.0, [{**base, **fields}]]))
    assert len(batch.events) + batch.num_unknown == 1
    for event in batch.events:
        assert isinstance(event, BlockStored | BlockRemoved)
        assert all(0 <= value < 2**64 for value in event.block_hashes)
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            assert len(event.extra_keys) in (0, len(event.block_hashes))


@given(st.lists(stored_events(block_size=3), max_size=5), st.integers(1, 40))
def test_a_snapshot_survives_any_cutting(sent: list[BlockStored], step: int) -> None:
    header = SnapshotHeader("epoch", 7, 3, sum(len(event.block_hashes) for event in sent), "digest")
    raw = encode_snapshot_header(header) + b"".join(map(encode_snapshot_block, sent))
    reader, read = SnapshotReader(), []
    for at in range(0, len(raw), step):
        read += reader.feed(raw[at:at + step])
    reader.close()
    assert reader.header == header
    assert [(e.block_hashes, e.parent_block_hash, e.token_ids, e.extra_keys) for e in read] == \
           [(e.block_hashes, e.parent_block_hash, e.token_ids, e.extra_keys) for e in sent]


@given(st.lists(stored_events(block_size=3), min_size=1, max_size=4), st.data())
def test_a_snapshot_cut_short_is_noticed(sent: list[BlockStored], data: st.DataObject) -> None:
    header = SnapshotHeader("epoch", 7, 3, sum(len(event.block_hashes) for event in sent), "digest")
    raw = encode_snapshot_header(header) + b"".join(map(encode_snapshot_block, sent))
    reader = SnapshotReader()
    reader.feed(raw[:data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CacheEventError, match="cut short"):
        reader.close()


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"block_hashes":[1],"parent_block_hash":null,"token_ids":[1]}',
                                  b'{"block_hashes":[-1],"parent_block_hash":null,"token_ids":[1,2,3]}',
                                  b'{"block_hashes":[1],"parent_block_hash":null,"token_ids":[1,2,3],'
                                  b'"extra_keys":[[[1,"zz",0]]]}',
                                  b'{"block_hashes":[1],"parent_block_hash":null,"token_ids":[1,2,3],'
                                  b'"extra_keys":[[[999,"00",0]]]}', b""])
def test_nonsense_in_a_snapshot(line: bytes) -> None:
    reader = SnapshotReader()
    reader.feed(encode_snapshot_header(SnapshotHeader("e", 0, 3, 1, "d")))
    with pytest.raises(CacheEventError, match="snapshot"):
        reader.feed(line + b"\n")


def test_a_snapshot_line_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.protocol.cache_events.SNAPSHOT_LINE_MAX_BYTES", 100)
    reader = SnapshotReader()
    for _ in range(10):
        reader.feed(b"x" * 10)
    with pytest.raises(CacheEventError, match="longer than 100"):
        reader.feed(b"x")
