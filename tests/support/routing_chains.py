"""Short chains of blocks over a small alphabet, so that random prompts share prefixes often."""

from __future__ import annotations

from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

ENDPOINTS = ("a", "b", "c")
Path = tuple[int, ...]

paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


def name_of(path: Path) -> int:
    """A block hash for the block at the end of `path`."""
    return xxh3_64_intdigest(bytes(path))


def prefixes_of(path: Path) -> list[Path]:
    """Each block on the way, first to last."""
    return [path[:length + 1] for length in range(len(path))]


def chain_of(path: Path) -> list[int]:
    return [name_of(prefix) for prefix in prefixes_of(path)]
