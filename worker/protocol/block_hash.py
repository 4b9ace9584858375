"""Block hashes: the one place that turns tokens into a chain.

Owns: the hash scheme (what must be equal for two hashes to mean the same K/V), the encoding of tokens and extra keys,
and the chain. Every reader and writer of hashes, in worker and gateway, calls this file; nothing else hashes tokens.
Changing one byte of the encoding means a new `VERSION` and new golden vectors in the same commit.

The chain: hash_i = xxh3_64(message_i, seed = hash_{i-1}), hash_{-1} = HashScheme.root(). The parent enters as the
seed, so each block is keyed by its whole prefix and, through the root, by the deployment's secret: nobody outside can
steer two prompts into one hash. message_i is the block's token ids as little-endian u32 and, if the block has extra
keys, their encoding behind it. A scheme fixes the block size, so a message of 4 * block_size bytes has no extra keys
and a longer one splits in one way only: no two inputs share a message.

Known approximation: 64 bits collide by chance (3 % for one pair among a billion blocks). A match is therefore a hint:
whoever serves K/V compares tokens, extra keys and the parent's identity first.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from xxhash import xxh3_64_intdigest

VERSION = 1
TOKEN_ID_MAX = 0xFFFF_FFFF
TOKEN_BYTES = 4
_KEY_HEAD = struct.Struct("<BII")
_COUNT = struct.Struct("<I")
_SCHEMES_REMEMBERED = 64
KEYS_REMEMBERED = 4096

KeyKind = Annotated[int, Meta(ge=1, le=255)]
KeyStart = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]


class ExtraKeyKind(IntEnum):
    """Type tags: a salt can never equal a LoRA digest, whatever its bytes."""

    LORA = 1
    GATEWAY_SALT = 2
    BODY_SALT = 3
    MULTIMODAL = 4


class ExtraKey(NamedTuple):
    """Something besides tokens that K/V depend on, from position `start` on.

    It is hashed into block `start // block_size` alone; the chain carries it to every later block. A salt that
    applies from a public prefix's length on thus lands in the first block that is not wholly public.
    """

    kind: KeyKind
    value: bytes
    start: KeyStart = 0


@dataclass(frozen=True, slots=True)
class HashScheme:
    """Everything that must be equal for two block hashes to mean the same K/V. Equal or incompatible.

    `seed` is the deployment's secret. `weights`, `tokenizer` and `template` are digests or revisions.
    """

    block_size: int
    seed: bytes
    model: str
    weights: str
    tokenizer: str
    template: str
    kv_dtype: str
    exactness: str
    version: int = VERSION

    def __hash__(self) -> int:
        # Looked up several times a request; of two fields that tell schemes apart Python remembers the hashes.
        return hash(self.seed) ^ hash(self.weights)

    def digest(self) -> str:
        """Hex SHA-256 over every field; safe to publish: neither the seed nor the root can be read back from it."""
        return _scheme_sha256(self, b"headstart/scheme-digest").hex()

    def root(self) -> int:
        """The parent of every first block: 64 bits of the scheme, so that chains of different schemes never meet."""
        return _root(self)

    def to_wire(self, *, with_seed: bool) -> dict[str, object]:
        """The JSON form (GET /kv). The seed, as hex, is for holders of the worker token only."""
        wire: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seed"}
        if with_seed:
            wire["seed"] = self.seed.hex()
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], *, seed: bytes | None = None) -> HashScheme:
        """The scheme a worker states. `seed` is ours, for a worker that keeps its own to itself.

        ValueError names the field.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name == "seed":
                values["seed"] = _seed_from_wire(wire, seed)
                continue
            wanted = int if field.name in ("block_size", "version") else str
            value = wire.get(field.name)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"hash scheme: {field.name!r} should be {wanted.__name__}, got {value!r}")
            values[field.name] = value
        if not 1 <= values["block_size"] <= TOKEN_ID_MAX:
            raise ValueError(f"hash scheme: block_size should be at least 1, got {values['block_size']}")
        return cls(**values)


class ChainHasher:
    """A chain that grows as tokens arrive; `hashes` equals block_hashes() over everything appended so far."""

    __slots__ = ("_block_bytes", "_keyed", "_parent", "_pending", "hashes")

    def __init__(self, scheme: HashScheme, extra_keys: Sequence[ExtraKey] = ()) -> None:
        self.hashes: list[int] = []
        self._block_bytes = scheme.block_size * TOKEN_BYTES
        self._keyed = _keys_by_block(extra_keys, scheme.block_size)
        self._parent = scheme.root()
        self._pending = b""

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Hashes of the blocks that these tokens filled, in order (often none)."""
        packed = self._pending + pack_tokens(token_ids)
        full_bytes = len(packed) - len(packed) % self._block_bytes
        self._pending = packed[full_bytes:]
        if not full_bytes:
            return []
        first = len(self.hashes)
        keyed = {index - first: keys for index, keys in self._keyed.items() if index >= first}
        filled = _chain(self._parent, packed[:full_bytes], self._block_bytes, keyed)
        self._parent = filled[-1]
        self.hashes += filled
        return filled


def block_hashes(token_ids: Sequence[int], scheme: HashScheme, extra_keys: Sequence[ExtraKey] = ()) -> list[int]:
    """The chained 64-bit hash of each full block, first to last. Token ids must fit u32."""
    block_bytes = scheme.block_size * TOKEN_BYTES
    packed = pack_tokens(token_ids)
    full = packed[: len(packed) - len(packed) % block_bytes]
    if not extra_keys:
        return _chain_plain(scheme.root(), full, block_bytes)
    return _chain(scheme.root(), full, block_bytes, _grouped_keys(tuple(extra_keys), scheme.block_size))


def continue_chain(parent: int, token_ids: Sequence[int], scheme: HashScheme,
                   keys_of_blocks: Sequence[Sequence[ExtraKey]] = ()) -> list[int]:
    """Hashes of the full blocks that follow the block hashed `parent` (scheme.root() for a first block).

    `keys_of_blocks` is parallel to those blocks, `start` relative to each, as cache events carry them; empty: none.
    """
    block_size = scheme.block_size
    if not keys_of_blocks and len(token_ids) == block_size:   # a decoding engine's events are mostly like this
        return [next_hash(parent, token_ids, block_size)]
    block_bytes = block_size * TOKEN_BYTES
    packed = pack_tokens(token_ids)
    full = packed[: len(packed) - len(packed) % block_bytes]
    keyed = {index: _canonical(keys) for index, keys in enumerate(keys_of_blocks) if keys}
    return _chain(parent, full, block_bytes, keyed)


def next_hash(parent: int, token_ids: Sequence[int], block_size: int) -> int:
    """The hash of one more block, without extra keys, behind the block hashed `parent`."""
    try:
        return xxh3_64_intdigest(_packer(block_size)(*token_ids), parent)
    except struct.error as error:
        raise AssertionError(f"not {block_size} token ids that fit u32") from error


def next_hashes(parents: Iterable[int], blocks: Iterable[Sequence[int]], block_size: int) -> list[int]:
    """next_hash() of several chains at once: the tokens of each block stand beside its parent."""
    pack = _packer(block_size)
    try:
        return [xxh3_64_intdigest(pack(*token_ids), parent)
                for parent, token_ids in zip(parents, blocks, strict=True)]
    except struct.error as error:
        raise AssertionError(f"not {block_size} token ids that fit u32") from error


def extra_keys_of_block(index: int, block_size: int, extra_keys: Sequence[ExtraKey]) -> tuple[ExtraKey, ...]:
    """The extra keys hashed into block `index`, in canonical order, `start` made relative to the block."""
    return _keys_by_block(extra_keys, block_size).get(index, ())


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32, the form that is hashed and that travels in internal requests.

    An array("I") is taken as it lies there, without an object for every id.
    """
    try:
        packed = array("I", token_ids)      # of an array this is one copy
    except OverflowError as error:
        raise AssertionError("a token id does not fit u32: check ids against the vocabulary first") from error
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def packed_view(token_ids: Sequence[int]) -> bytes | array[int]:
    """pack_tokens(), or what lies in memory like that already."""
    if isinstance(token_ids, array) and token_ids.typecode == "I" and sys.byteorder == "little":
        return token_ids
    return pack_tokens(token_ids)


def unpack_tokens(packed: bytes | memoryview) -> list[int]:
    """The inverse of pack_tokens; the length must be a multiple of four."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


@lru_cache(_SCHEMES_REMEMBERED)
def _packer(block_size: int) -> Callable[..., bytes]:
    """pack_tokens() of so many ids, given one by one: for a few it is the faster."""
    return struct.Struct(f"<{block_size}I").pack


def _chain(parent: int, packed: bytes, block_bytes: int, keyed: Mapping[int, tuple[ExtraKey, ...]]) -> list[int]:
    """The chain over whole blocks; runs between the few blocks with extra keys take the tight loop."""
    hashes: list[int] = []
    done = 0
    for index in sorted(keyed):
        at = index * block_bytes
        if at >= len(packed):
            break
        hashes += _chain_plain(parent, packed[done:at], block_bytes)
        parent = hashes[-1] if hashes else parent
        done = at + block_bytes
        hashes.append(parent := xxh3_64_intdigest(packed[at:done] + _encode_keys(keyed[index]), parent))
    hashes += _chain_plain(parent, packed[done:] if done else packed, block_bytes)
    return hashes


def _chain_plain(parent: int, packed: bytes, block_bytes: int) -> list[int]:
    # A walrus in a comprehension is the fastest chain that Python offers: about 60 ns a block.
    return [parent := xxh3_64_intdigest(block, parent) for (block,) in struct.iter_unpack(f"{block_bytes}s", packed)]


def _encode_keys(keys: tuple[ExtraKey, ...]) -> bytes:
    """u32 count, then per key u8 kind, u32 start, u32 length and the bytes."""
    parts = chain.from_iterable((_KEY_HEAD.pack(kind, start, len(value)), value) for kind, value, start in keys)
    return _COUNT.pack(len(keys)) + b"".join(parts)


def _canonical(keys: Iterable[ExtraKey]) -> tuple[ExtraKey, ...]:
    """Order and repetition carry no meaning, so they must not change the hash."""
    return tuple(sorted(set(keys), key=lambda key: (key.start, key.kind, key.value)))


@lru_cache(KEYS_REMEMBERED)
def _grouped_keys(extra_keys: tuple[ExtraKey, ...], block_size: int) -> Mapping[int, tuple[ExtraKey, ...]]:
    """A tenant's requests have the same keys again and again. Nobody changes what this returns."""
    return _keys_by_block(extra_keys, block_size)


def _keys_by_block(extra_keys: Sequence[ExtraKey], block_size: int) -> dict[int, tuple[ExtraKey, ...]]:
    if not extra_keys:
        return {}
    grouped: dict[int, list[ExtraKey]] = {}
    for kind, value, start in extra_keys:
        assert 1 <= kind <= 255, "the kind of an extra key is in 1..255"
        assert start >= 0, "an extra key starts at a position of 0 or more"
        index, offset = divmod(start, block_size)
        grouped.setdefault(index, []).append(ExtraKey(int(kind), value, offset))
    return {index: _canonical(keys) for index, keys in grouped.items()}


def _scheme_sha256(scheme: HashScheme, domain: bytes) -> bytes:
    """SHA-256 over every field, typed and length-prefixed. A domain for each use: the published digest is no root."""
    sha = hashlib.sha256(domain)
    for field in fields(scheme):
        value = getattr(scheme, field.name)
        kind, data = ((b"i", value.to_bytes(8, "little")) if isinstance(value, int) else
                      (b"b", value) if isinstance(value, bytes) else (b"s", value.encode()))
        sha.update(kind + _COUNT.pack(len(data)) + data)
    return sha.digest()


@lru_cache(maxsize=_SCHEMES_REMEMBERED)
def _root(scheme: HashScheme) -> int:
    return int.from_bytes(_scheme_sha256(scheme, b"headstart/chain-root")[:8], "little")


def _seed_from_wire(wire: Mapping[str, Any], seed: bytes | None) -> bytes:
    stated = wire.get("seed")
    if stated is None:
        if seed is None:
            raise ValueError("hash scheme: the worker keeps its seed to itself; give the same HEADSTART_WORKER_TOKEN "
                             "to worker and gateway")
        return seed
    try:
        return bytes.fromhex(stated)
    except (TypeError, ValueError):
        raise ValueError("hash scheme: 'seed' should be hex") from None
