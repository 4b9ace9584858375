"""Bets that stay out of the tree until somebody comes by, against the same bets placed at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, product

import pytest

from gateway.routing import unplaced_bets
from gateway.routing.prefix_index import NO_MATCH, PrefixIndex, Speculation
from tests.support.routing_chains import ENDPOINTS, Path, chain_of, name_of

ROOMY_BYTES = 1 << 40
KINDS = {"store": 8, "remove": 12, "bet": 8, "bet again": 4, "match": 2, "withdraw": 2, "settle": 2, "purge": 1}


class Twin:
    """An index and its bets. An eager one asks for what it has just bet on, which places it."""

    def __init__(self, *, is_eager: bool) -> None:
        self.index = PrefixIndex(ROOMY_BYTES)
        self.bets: list[Speculation] = []
        self.is_eager = is_eager

    def take(self, step: tuple[str, str, Path, int], now: float) -> object:
        """What the step returned, as far as anybody can see."""
        kind, endpoint_id, path, number = step
        start = min(number, len(path) - 1)
        index, chain = self.index, chain_of(path)
        if kind == "store":
            return index.store(endpoint_id, chain[start:], parent=name_of(path[:start]) if start else None)
        if kind == "remove":
            return index.remove(endpoint_id, reversed(chain[start:]))
        if kind == "bet":
            return self.bet(endpoint_id, chain, now + number)
        if kind == "bet again":   # as the gateway does, which has just asked
            held = index.match(chain, now).get(endpoint_id, NO_MATCH)
            return self.bet(endpoint_id, chain, now + number, confirmed=held.confirmed_blocks)
        if kind == "match":
            return index.match(chain, now)
        if kind == "purge":
            return index.purge(endpoint_id)
        if self.bets and kind == "withdraw":
            index.withdraw(self.bets.pop(number % len(self.bets)))
        elif self.bets:
            self.bets[number % len(self.bets)].settle(now)
        return None

    def bet(self, endpoint_id: str, chain: list[int], expires_at: float, *, confirmed: int | None = None) -> int:
        bet = self.index.speculate(endpoint_id, chain, expires_at, confirmed=confirmed)
        bet.hold(2.0)
        self.bets.append(bet)
        num_blocks = bet.num_blocks
        if self.is_eager:
            self.index.match(chain, 0.0)
        return num_blocks

    def counts(self) -> list[tuple[int, int]]:
        return [(self.index.num_blocks(name), self.index.num_speculative_blocks(name)) for name in ENDPOINTS]


def walk(chance: random.Random) -> Iterator[tuple[str, str, Path, int]]:
    """Steps among few blocks and endpoints, mostly bets and what takes away the ground they stand on."""
    while True:
        path = tuple(chance.randrange(2) for _ in range(chance.randint(1, 4)))
        [kind] = chance.choices(list(KINDS), list(KINDS.values()))
        yield kind, chance.choice(ENDPOINTS[:2]), path, chance.randrange(4)


@pytest.mark.parametrize("seed", range(6))
def test_nobody_can_tell_when_a_bet_is_placed(seed: int) -> None:
    lazy, eager = Twin(is_eager=False), Twin(is_eager=True)
    for number, step in enumerate(islice(walk(random.Random(seed)), 1000)):
        assert lazy.take(step, number / 2) == eager.take(step, number / 2), step
        lazy.index.check_invariants()
        assert lazy.counts() == eager.counts()
    eager.index.check_invariants()
    for path in product(range(2), repeat=4):
        assert lazy.index.match(chain_of(path), 500.0) == eager.index.match(chain_of(path), 500.0)


def test_a_bet_that_events_confirm_leaves_nothing_to_place() -> None:
    index = PrefixIndex(ROOMY_BYTES)
    index.store("a", [1, 2])
    bet = index.speculate("a", [1, 2, 3, 4], 5.0)
    assert (bet.num_blocks, index.num_blocks(), index.num_speculative_blocks("a")) == (2, 2, 2)
    assert index.store("a", [3, 4, 5], parent=2) == 3
    assert (bet.num_blocks, index.num_blocks("a"), index.num_speculative_blocks("a")) == (0, 5, 0)
    index.withdraw(bet)
    index.check_invariants()
    assert index.match([1, 2, 3, 4], 0.0)["a"].confirmed_blocks == 4


def test_beyond_the_limit_bets_are_placed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unplaced_bets, "UNPLACED_BETS_MAX", 2)
    index = PrefixIndex(ROOMY_BYTES)
    for first in (10, 20, 30, 40):
        index.speculate("a", [first, first + 1], 5.0)
    assert index.num_blocks() == 4
    assert index.num_speculative_blocks("a") == 8
    index.check_invariants()
    assert index.match([10, 11], 0.0)["a"].speculative_blocks == 2


def test_under_a_small_bound_unplaced_bets_are_the_last_to_go() -> None:
    index = PrefixIndex(6_000)
    for first in range(100, 200, 10):
        index.speculate("a", list(range(first, first + 8)), 5.0)
        index.check_invariants()
        assert index.num_blocks() == 0
    assert 0 < index.num_speculative_blocks("a") < 80
    assert index.match(list(range(100, 108)), 0.0) == {}
    assert index.match(list(range(190, 198)), 0.0)["a"].speculative_blocks == 8
