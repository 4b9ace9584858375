"""Byte vectors of vLLM's and SGLang's event payloads, made with an independent encoder."""

from __future__ import annotations

import msgspec
import pytest

from worker.protocol.block_hash import ExtraKey, ExtraKeyKind
from worker.protocol.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEventError,
    ReplayEnd,
    ReplayItem,
    decode_batch,
    encode_batch,
    encode_live_message,
    encode_replay_end,
    encode_replay_reply,
    encode_replay_request,
    parse_live_message,
    parse_replay_reply,
    parse_replay_request,
)

HASH = 0x1122334455667788
ARRAYS = bytes.fromhex(
    "93cb3ff80000000000009397ab426c6f636b53746f72656491cf1122334455667788c0940102030404c0a347505593ac426c6f636b52"
    "656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172656400")
MAPS = bytes.fromhex(
    "93cb3ff80000000000009386a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf1122334455667788b170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a66d656469756da34750"
    "5583a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf1122334455667788a66d656469756da3475055"
    "81a474797065b0416c6c426c6f636b73436c6561726564c0")
EVENTS = [BlockStored((HASH,), None, (1, 2, 3, 4), 4), BlockRemoved((HASH,)), AllBlocksCleared()]


def payload(*events: object, tail: tuple[object, ...] = (None,)) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), *tail])


def stored(**fields: object) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": [HASH], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
            "block_size": 4, **fields}


def test_arrays() -> None:
    batch = decode_batch(ARRAYS)
    assert (batch.ts, batch.events, batch.dp_rank, batch.num_unknown) == (1.5, EVENTS, 0, 0)


def test_maps() -> None:
    batch = decode_batch(MAPS)
    assert (batch.ts, batch.events, batch.dp_rank, batch.epoch) == (1.5, EVENTS, None, None)


def test_we_write_what_vllm_writes_byte_for_byte() -> None:
    assert encode_batch(EVENTS, ts=1.5) == MAPS


def test_both_encodings_in_one_batch() -> None:
    batch = decode_batch(payload(["BlockRemoved", [HASH]], {"type": "BlockRemoved", "block_hashes": [HASH]}))
    assert batch.events == [BlockRemoved((HASH,))] * 2


@pytest.mark.parametrize(("on_wire", "folded"), [
    (2**64 - 1, 2**64 - 1), (0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (bytes(range(32)), 0x18191A1B1C1D1E1F),
    (b"\x07", 7)])
def test_hash_forms(on_wire: object, folded: int) -> None:
    raw = stored(block_hashes=[on_wire], parent_block_hash=on_wire)
    (as_map,) = decode_batch(payload(raw)).events
    (as_array,) = decode_batch(payload(["BlockStored", [on_wire], on_wire, [1, 2, 3, 4], 4])).events
    for event in (as_map, as_array):
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.parent_block_hash) == ((folded,), folded)


def test_unknown_fields_and_trailing_items_are_skipped() -> None:
    batch = decode_batch(payload(stored(session_id="x", locality={"a": [1]}), tail=(3, "more", [])))
    assert batch.events == [EVENTS[0]]
    assert batch.dp_rank == 3
    long_array = ["BlockStored", [HASH], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 0, "full", None, "here", "s"]
    (event,) = decode_batch(payload(long_array)).events
    assert isinstance(event, BlockStored)
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full")


def test_missing_rank() -> None:
    assert decode_batch(payload(stored(), tail=())).dp_rank is None


@pytest.mark.parametrize("bad", [
    {"type": "LoadReport", "load": 3}, ["LoadReport", 3], {"no": "type"}, [], 7, None, "text", [["nested"]],
    stored(block_hashes=7), stored(block_hashes=["text"]), stored(block_hashes=[b""]), stored(block_hashes=[True]),
    stored(token_ids=[1, 2, 3]), stored(token_ids=[1, 2, 3, 2**32]), stored(token_ids=[1, 2, 3, -1]),
    stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]), stored(block_size=0), stored(block_size="4"),
    stored(extra_keys=["a", "b"]), stored(extra_keys=[[[1, b"x", 0]], None]), stored(extra_keys=7),
    {"type": "BlockStored", "block_hashes": [HASH]}, ["BlockStored", [HASH], None], ["BlockRemoved"]])
def test_what_cannot_be_used_is_counted_and_its_neighbours_are_kept(bad: object) -> None:
    batch = decode_batch(payload(stored(), bad, {"type": "AllBlocksCleared"}))
    assert batch.events == [EVENTS[0], EVENTS[2]]
    assert batch.num_unknown == 1


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode({"a": 1}),
                                 msgspec.msgpack.encode(["x", []]), msgspec.msgpack.encode([1.0]),
                                 msgspec.msgpack.encode([1.0, 5])])
def test_what_is_no_batch_at_all(raw: bytes) -> None:
    with pytest.raises(CacheEventError):
        decode_batch(raw)


@pytest.mark.parametrize("foreign", [["salt"], [["image", 3]], ["lora", ["image", 0], "salt"], [b"digest"]])
def test_foreign_extra_keys_are_kept_raw(foreign: list[object]) -> None:
    (event,) = decode_batch(payload(stored(extra_keys=[foreign]))).events
    assert isinstance(event, BlockStored)
    assert event.extra_keys == ()
    assert event.foreign_extra_keys == (tuple(tuple(k) if isinstance(k, list) else k for k in foreign),)
    assert hash(event)


def test_extra_keys_that_say_nothing() -> None:
    for nothing in (None, [None], [[]]):
        (event,) = decode_batch(payload(stored(extra_keys=nothing))).events
        assert isinstance(event, BlockStored)
        assert not any(event.extra_keys)
        assert event.foreign_extra_keys == ()


def test_sglang_salt_and_medium() -> None:
    (event,) = decode_batch(payload(stored(block_hashes=[-5], medium="CPU_PINNED", cache_salt="s", lora_id=3))).events
    assert isinstance(event, BlockStored)
    assert (event.medium, event.cache_salt, event.lora_id) == ("CPU_PINNED", "s", 3)


def test_our_additions_round_trip_and_look_like_vllm_to_others() -> None:
    key = ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"\x00salt", 3)
    event = BlockStored((HASH, 9), 7, tuple(range(8)), 4, ((), (key,)))
    raw = encode_batch([event, BlockRemoved((HASH,)), AllBlocksCleared()], ts=2.0, dp_rank=1, epoch="e1")
    batch = decode_batch(raw)
    assert (batch.epoch, batch.dp_rank, batch.num_unknown) == ("e1", 1, 0)
    assert batch.events[0] == msgspec.structs.replace(event, epoch="e1")

    class StrictStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
        """As vLLM types the field."""

        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        extra_keys: list[tuple[object, ...] | None] | None = None

    read = msgspec.msgpack.decode(raw, type=tuple[float, list[object], int])
    assert msgspec.convert(read[1][0], StrictStored).block_hashes == [HASH, 9]


def test_empty_batch() -> None:
    assert decode_batch(encode_batch([], ts=0.0, epoch="e"))[1:] == ([], None, None, 0)


def test_replay_frames_of_both_generations() -> None:
    seq = (7).to_bytes(8, "big")
    ends = b"\xff" * 8
    for frames in ([b"", seq, b"p"], [b"", b"", seq, b"p"], [b"", b"kv@host@model", seq, b"p"], [seq, b"p"]):
        assert parse_replay_reply(frames) == ReplayItem(7, b"p")
    for frames in ([b"", ends, b""], [b"", b"", ends, b""], [b"", seq, b""], [b"", b"topic", ends, b"x"]):
        assert parse_replay_reply(frames) == ReplayEnd()
    assert parse_replay_reply(encode_replay_reply(b"", 7, b"p")) == ReplayItem(7, b"p")
    assert parse_replay_reply(encode_replay_end()) == ReplayEnd()
    for frames in ([], [b"p"], [b"", b"short", b"p"], [b""] * 5):
        with pytest.raises(CacheEventError):
            parse_replay_reply(frames)


def test_replay_request_and_live_frames() -> None:
    assert encode_replay_request(258) == [b"", b"\x00\x00\x00\x00\x00\x00\x01\x02"]
    assert parse_replay_request(encode_replay_request(258)) == 258
    assert parse_replay_request([(3).to_bytes(8, "big")]) == 3
    message = encode_live_message(b"kv", 2**64 - 1, b"p")
    assert message == [b"kv", b"\xff" * 8, b"p"]
    assert parse_live_message(message) == (b"kv", 2**64 - 1, b"p")
    for bad in ([], [b"", b""], [b"x", b"12345678"]):
        with pytest.raises(CacheEventError):
            parse_replay_request(bad)
    with pytest.raises(CacheEventError):
        parse_live_message([b"", b"1234567", b"p"])
    with pytest.raises(CacheEventError):
        parse_live_message([b"", b"p"])
