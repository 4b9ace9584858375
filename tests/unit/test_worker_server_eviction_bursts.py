"""Evictions are added up per request and told in bursts; no block is told twice, none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.server.eviction_bursts import BURST_S, EvictionBursts

Told = list[tuple[str | None, int]]


def bursts() -> tuple[EvictionBursts, Told]:
    told: Told = []
    return EvictionBursts(lambda request_id, num_blocks: told.append((request_id, num_blocks))), told


def test_one_line_when_the_request_ends() -> None:
    evictions, told = bursts()
    for step in range(5):
        evictions.add("r", 1, step * BURST_S / 10)
    assert told == []
    evictions.ended("r")
    evictions.ended("r")
    assert told == [("r", 5)]


def test_a_long_request_tells_every_burst() -> None:
    evictions, told = bursts()
    evictions.add("r", 3, 0.0)
    evictions.add("s", 1, BURST_S / 2)
    evictions.add("r", 0, BURST_S)
    assert told == [("r", 3)]
    evictions.add("r", 2, BURST_S * 1.1)
    evictions.ended("r")
    evictions.ended("s")
    assert told == [("r", 3), ("r", 2), ("s", 1)]


def test_a_request_without_evictions_has_no_line() -> None:
    evictions, told = bursts()
    evictions.add(None, 0, 0.0)
    evictions.add("r", 0, 9.0)
    evictions.ended("r")
    assert told == []


def test_evictions_for_nobody_are_told_at_once() -> None:
    evictions, told = bursts()
    evictions.add(None, 4, 0.0)
    assert told == [(None, 4)]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 5), st.floats(0, 0.7)), max_size=40))
def test_every_block_is_told_once(steps: list[tuple[str | None, int, float]]) -> None:
    evictions, told = bursts()
    now = 0.0
    for request_id, num_blocks, pause in steps:
        now += pause
        evictions.add(request_id, num_blocks, now)
    for request_id in ("a", "b"):
        evictions.ended(request_id)
    for request_id in ("a", "b", None):
        assert sum(blocks for key, blocks in told if key == request_id) == sum(
            blocks for key, blocks, _ in steps if key == request_id)
