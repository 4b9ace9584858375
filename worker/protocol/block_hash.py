"""Block hashes: the one function that turns tokens into a chain (interface first; the body is being written)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class ExtraKeyKind(IntEnum):
    """Type tags: a salt can never equal a LoRA digest, whatever its bytes."""

    LORA = 1
    GATEWAY_SALT = 2
    BODY_SALT = 3
    MULTIMODAL = 4


class ExtraKey(NamedTuple):
    """Something besides tokens that K/V depend on, from position `start` on: hashed into block start // block_size."""

    kind: int
    value: bytes
    start: int = 0


@dataclass(frozen=True, slots=True)
class HashScheme:
    """Everything that must be equal for two block hashes to mean the same K/V. Equal or incompatible."""

    block_size: int
    seed: bytes
    model: str
    weights: str
    tokenizer: str
    template: str
    kv_dtype: str
    exactness: str
    version: int = 1

    def digest(self) -> str:
        """Hex SHA-256 over every field in a fixed encoding; safe to publish (the seed enters, but cannot be read back)."""
        raise AssertionError("being written")

    def root(self) -> int:
        """The parent of every first block: 64 bits of the scheme, so that chains of different schemes never meet."""
        raise AssertionError("being written")


def block_hashes(token_ids: Sequence[int], scheme: HashScheme, extra_keys: Sequence[ExtraKey] = ()) -> list[int]:
    """The chained 64-bit hash of each full block, first to last."""
    raise AssertionError("being written")


def extra_keys_of_block(index: int, block_size: int, extra_keys: Sequence[ExtraKey]) -> tuple[ExtraKey, ...]:
    """The extra keys hashed into block `index`, in canonical order, `start` made relative to the block."""
    raise AssertionError("being written")
