"""KV cache events in vLLM's wire format, their replay, and the snapshot of a worker's cache.

Owns: the three events, the batch codec, the frames of the live and the replay socket, the snapshot's lines.
Must never: hash anything, open a socket, or keep state about a worker (sequence and epoch are the reader's business).

Written: map-encoded events with explicit `medium`, as vLLM 0.24 and later write them. Our additions: a map key that
other readers skip, `epoch` (the worker's boot id), and triples [kind, value, start in the block] inside `extra_keys`.
Read: maps and the older positional arrays, event by event; unsigned, negative (taken modulo 2**64) and 32-byte hashes
(folded to their last 8 bytes); unknown fields; unknown or unusable events are counted, never fatal to their batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from worker.protocol.block_hash import TOKEN_ID_MAX, ExtraKey, KeyKind, KeyStart

SNAPSHOT_LINE_MAX_BYTES = 4 * 1024 * 1024
SEQ_BYTES = 8
REPLAY_END_SEQ = b"\xff" * SEQ_BYTES
_HASH_MASK = (1 << 64) - 1

Hash = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]


class CacheEventError(ValueError):
    """A payload, a frame or a snapshot line that cannot be one of ours or of vLLM's."""


def _gpu() -> str:
    # A default made by a factory is written out even so; some readers want to see the medium.
    return "GPU"


class BlockStored(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="BlockStored"):
    """Blocks became findable, each the child of the one before, the first the child of `parent_block_hash`.

    `token_ids` holds len(block_hashes) * block_size ids. `extra_keys` is parallel to `block_hashes` (empty: none have
    any). What another engine put there is kept as it came in `foreign_extra_keys` (LoRA names, (mm id, offset),
    salts), parallel too, None for a block without; who does not understand them must not match such blocks.
    """

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    token_ids: tuple[TokenId, ...]
    block_size: Annotated[int, Meta(ge=1)]
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    medium: str = msgspec.field(default_factory=_gpu)
    group_idx: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    epoch: str | None = None
    foreign_extra_keys: tuple[object, ...] = ()


class BlockRemoved(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="BlockRemoved"):
    """Blocks are no longer findable. One entry per physical eviction: an engine may name a hash more than once."""

    block_hashes: tuple[Hash, ...]
    medium: str = msgspec.field(default_factory=_gpu)
    group_idx: int | None = None
    epoch: str | None = None


class AllBlocksCleared(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="AllBlocksCleared"):
    """Everything of this worker is gone."""

    epoch: str | None = None


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(NamedTuple):
    """A decoded payload. `epoch` is None from other engines; `num_unknown` counts events that could not be used."""

    ts: float
    events: list[CacheEvent]
    dp_rank: int | None = None
    epoch: str | None = None
    num_unknown: int = 0


class LiveMessage(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes


class ReplayItem(NamedTuple):
    seq: int
    payload: bytes


class ReplayEnd(NamedTuple):
    """The worker has sent every batch that it still holds."""


class SnapshotHeader(Struct, frozen=True):
    """First line of GET /kv/snapshot. Batches with seq >= `barrier_seq` are not in it: apply them after it."""

    epoch: str
    barrier_seq: int
    block_size: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=0)]
    hash_scheme_digest: str


class _MapBatch(Struct, array_like=True):
    """The fast path: every event a well-formed map, as we and current vLLM write them."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    dp_rank: int | None = None


class _RawBatch(Struct, array_like=True):
    ts: float
    events: list[Any]
    dp_rank: Any = None


class _SnapshotLine(Struct, frozen=True, omit_defaults=True):
    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    token_ids: tuple[TokenId, ...]
    extra_keys: tuple[tuple[tuple[KeyKind, str, KeyStart], ...], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_raw_decoder = msgspec.msgpack.Decoder(_RawBatch)
_line_decoder = msgspec.json.Decoder(_SnapshotLine)
_header_decoder = msgspec.json.Decoder(SnapshotHeader)

# Field order of the positional encoding; what newer builds append is ignored.
_POSITIONS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def encode_batch(events: Iterable[CacheEvent], *, ts: float, dp_rank: int | None = None,
                 epoch: str | None = None) -> bytes:
    """The msgpack payload [ts, events, dp_rank]; `epoch` is stamped on every event."""
    stamped = list(events) if epoch is None else [msgspec.structs.replace(event, epoch=epoch) for event in events]
    return _encoder.encode((ts, stamped, dp_rank))


def decode_batch(payload: bytes) -> EventBatch:
    """Reads a payload of any engine. CacheEventError only when it is no [ts, events, ...] at all."""
    try:
        batch = _map_decoder.decode(payload)
    except msgspec.ValidationError:
        return _decode_raw(payload)
    except msgspec.DecodeError as error:
        raise CacheEventError(f"not msgpack: {error}") from error
    events: list[CacheEvent] = [event for event in batch.events if _fits(event)]
    return EventBatch(batch.ts, events, batch.dp_rank, _epoch_of(events), len(batch.events) - len(events))


def encode_live_message(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """The three frames of the PUB socket."""
    return [topic, seq.to_bytes(SEQ_BYTES, "big"), payload]


def parse_live_message(frames: Sequence[bytes]) -> LiveMessage:
    """The three frames of a SUB socket; CacheEventError for anything else."""
    if len(frames) != 3:
        raise CacheEventError(f"a live message has 3 frames, got {len(frames)}")
    return LiveMessage(frames[0], _parse_seq(frames[1]), frames[2])


def encode_replay_request(start_seq: int) -> list[bytes]:
    """What a DEALER sends to hear every held batch from `start_seq` on."""
    return [b"", start_seq.to_bytes(SEQ_BYTES, "big")]


def parse_replay_request(frames: Sequence[bytes]) -> int:
    """The start sequence out of what follows the identity frame on the ROUTER: [empty, seq] or [seq]."""
    if not 1 <= len(frames) <= 2 or (len(frames) == 2 and frames[0]):
        raise CacheEventError(f"a replay request is [empty, start seq], got {len(frames)} frames")
    return _parse_seq(frames[-1])


def encode_replay_reply(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """One replayed batch, to send behind the identity frame."""
    return [b"", topic, seq.to_bytes(SEQ_BYTES, "big"), payload]


def encode_replay_end() -> list[bytes]:
    """The end of a replay, to send behind the identity frame."""
    return [b"", b"", REPLAY_END_SEQ, b""]


def parse_replay_reply(frames: Sequence[bytes]) -> ReplayItem | ReplayEnd:
    """Reads a DEALER's frames: an empty delimiter, a topic in newer builds, then sequence and payload.

    Both forms end in (seq, payload), so the frames in front, of which the topic may be empty too, need no guessing.
    """
    if not 2 <= len(frames) <= 4:
        raise CacheEventError(f"a replay reply has 2 or 3 frames behind the delimiter, got {len(frames)} in all")
    seq, payload = frames[-2], frames[-1]
    if seq == REPLAY_END_SEQ or not payload:
        return ReplayEnd()
    return ReplayItem(_parse_seq(seq), payload)


def encode_snapshot_header(header: SnapshotHeader) -> bytes:
    """The first line, with its newline."""
    return msgspec.json.encode(header) + b"\n"


def encode_snapshot_block(stored: BlockStored) -> bytes:
    """One line, with its newline; parents come before their children. Hashes as JSON integers, key values in hex."""
    keys = tuple(tuple((int(kind), value.hex(), start) for kind, value, start in of_block)
                 for of_block in stored.extra_keys)
    line = _SnapshotLine(stored.block_hashes, stored.parent_block_hash, stored.token_ids, keys)
    return msgspec.json.encode(line) + b"\n"


class SnapshotReader:
    """Reads a snapshot as it streams in. feed() chunks of any size, then close(), which fails on a truncated one."""

    def __init__(self) -> None:
        self.header: SnapshotHeader | None = None
        self.num_blocks = 0
        self._rest = b""

    def feed(self, chunk: bytes) -> list[BlockStored]:
        """The blocks of every line that this chunk completed, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if max(map(len, (*lines, self._rest))) > SNAPSHOT_LINE_MAX_BYTES:
            raise CacheEventError(f"snapshot: a line is longer than {SNAPSHOT_LINE_MAX_BYTES} bytes")
        try:
            return [stored for line in lines if (stored := self._read_line(line)) is not None]
        except (msgspec.DecodeError, ValueError) as error:
            raise CacheEventError(f"snapshot: {error}") from error

    def close(self) -> None:
        """CacheEventError unless the header came and as many blocks as it promised."""
        promised = self.header.num_blocks if self.header else None
        if self._rest or promised != self.num_blocks:
            raise CacheEventError(f"snapshot cut short: {self.num_blocks} of {promised} blocks came")

    def _read_line(self, line: bytes) -> BlockStored | None:
        if self.header is None:
            self.header = _header_decoder.decode(line)
            return None
        read = _line_decoder.decode(line)
        keys = tuple(tuple(ExtraKey(kind, bytes.fromhex(value), start) for kind, value, start in of_block)
                     for of_block in read.extra_keys)
        stored = BlockStored(read.block_hashes, read.parent_block_hash, read.token_ids, self.header.block_size, keys)
        if not _fits(stored):
            raise CacheEventError(f"block {self.num_blocks}: tokens, hashes and extra keys do not fit each other")
        self.num_blocks += len(read.block_hashes)
        return stored


def _fits(event: CacheEvent) -> bool:
    if type(event) is not BlockStored:
        return True
    num_blocks = len(event.block_hashes)
    return len(event.token_ids) == num_blocks * event.block_size and len(event.extra_keys) in (0, num_blocks)


def _epoch_of(events: Sequence[CacheEvent]) -> str | None:
    return events[0].epoch if events else None


def _parse_seq(frame: bytes) -> int:
    if len(frame) != SEQ_BYTES:
        raise CacheEventError(f"a sequence frame has {SEQ_BYTES} bytes, got {len(frame)}")
    return int.from_bytes(frame, "big")


def _decode_raw(payload: bytes) -> EventBatch:
    """The tolerant path: each event on its own merits."""
    try:
        batch = _raw_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise CacheEventError(f"not an event batch: {error}") from error
    events = [event for raw in batch.events if (event := _event_from_raw(raw)) is not None]
    dp_rank = batch.dp_rank if type(batch.dp_rank) is int else None
    return EventBatch(batch.ts, events, dp_rank, _epoch_of(events), len(batch.events) - len(events))


def _event_from_raw(raw: object) -> CacheEvent | None:
    """An event from its map or array; None when its type is unknown or a field that we need is unusable."""
    if isinstance(raw, dict):
        tag, values = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        tag = raw[0]
        values = dict(zip(_POSITIONS.get(tag, ()), raw[1:], strict=False)) if isinstance(tag, str) else {}
    else:
        return None
    try:
        if tag == "BlockStored":
            return _stored_from_raw(values)
        if tag == "BlockRemoved":
            return BlockRemoved(_fold_all(values["block_hashes"]), _medium(values),
                                _optional(values, "group_idx", int), _optional(values, "epoch", str))
        return AllBlocksCleared(_optional(values, "epoch", str)) if tag == "AllBlocksCleared" else None
    except (KeyError, TypeError, ValueError):
        return None


def _stored_from_raw(values: Mapping[str, Any]) -> BlockStored | None:
    parent = values["parent_block_hash"]
    extra_keys, foreign = _extra_keys_from_raw(values.get("extra_keys"))
    stored = BlockStored(
        block_hashes=_fold_all(values["block_hashes"]),
        parent_block_hash=None if parent is None else _fold(parent),
        # Speculative decoders of other engines publish pairs instead of ids; those fail here and are counted.
        token_ids=msgspec.convert(values["token_ids"], tuple[TokenId, ...]),
        block_size=msgspec.convert(values["block_size"], Annotated[int, Meta(ge=1)]),
        extra_keys=extra_keys,
        medium=_medium(values),
        group_idx=_optional(values, "group_idx", int),
        lora_id=_optional(values, "lora_id", int),
        lora_name=_optional(values, "lora_name", str),
        kv_cache_spec_kind=_optional(values, "kv_cache_spec_kind", str),
        cache_salt=_optional(values, "cache_salt", str),
        epoch=_optional(values, "epoch", str),
        foreign_extra_keys=foreign,
    )
    return stored if _fits(stored) and len(foreign) in (0, len(stored.block_hashes)) else None


def _extra_keys_from_raw(raw: object) -> tuple[tuple[tuple[ExtraKey, ...], ...], tuple[object, ...]]:
    """(our own typed keys, another engine's raw ones): one of the two is empty."""
    if raw is None:
        return (), ()
    try:
        ours = msgspec.convert(raw, tuple[tuple[ExtraKey, ...] | None, ...])
        return (tuple(keys or () for keys in ours) if any(ours) else ()), ()
    except msgspec.ValidationError:
        return (), msgspec.convert(_frozen(raw), tuple[object, ...])


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _fold_all(hashes: Sequence[object]) -> tuple[int, ...]:
    return tuple([_fold(value) for value in hashes])


def _fold(value: object) -> int:
    """Any engine's hash as 64 unsigned bits: signed taken modulo 2**64, a digest's last 8 bytes, big-endian."""
    if type(value) is int:
        return value & _HASH_MASK
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise TypeError(f"not a block hash: {value!r}")


def _medium(values: Mapping[str, Any]) -> str:
    return _optional(values, "medium", str) or "GPU"


def _optional(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    return value if type(value) is kind else None
