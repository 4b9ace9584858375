"""`--kv-memory`: amounts, shares, nonsense; how many blocks come of it."""

from __future__ import annotations

import pytest

from worker.engine.engine_config import EngineSetupError
from worker.engine.kv_budget import num_kv_blocks, parse_kv_memory


@pytest.mark.parametrize(("text", "expected"), [
    ("2GiB", 2 * 2**30), ("2gib", 2 * 2**30), ("500MB", 500_000_000), (" 1.5 MiB ", 3 * 2**19), ("4096", 4096),
    ("64k", 64_000), ("0.9", 0.9), ("1.0", 1.0), ("1", 1.0), ("12B", 12)])
def test_amounts_and_shares(text: str, expected: float) -> None:
    value = parse_kv_memory(text)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5", "0.0", "0", "0GiB", "2 GiB more", "1e9", "2XB", "nan"])
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(EngineSetupError, match="kv_memory"):
        parse_kv_memory(text)


@pytest.mark.parametrize(("kv_memory", "expected"), [("1000", 10), ("0.5", 50), ("1.0", 100), ("100", 1), ("199", 1)])
def test_blocks_that_fit(kv_memory: str, expected: int) -> None:
    assert num_kv_blocks(kv_memory, block_bytes=100, free_bytes=10_000) == expected


def test_not_even_one_block() -> None:
    with pytest.raises(EngineSetupError, match="one block"):
        num_kv_blocks("99", block_bytes=100, free_bytes=10_000)


def test_more_than_is_free() -> None:
    with pytest.raises(EngineSetupError, match="more than"):
        num_kv_blocks("1GiB", block_bytes=100, free_bytes=10_000)


def test_nothing_is_free() -> None:
    with pytest.raises(EngineSetupError, match="one block"):
        num_kv_blocks("0.9", block_bytes=100, free_bytes=0)
