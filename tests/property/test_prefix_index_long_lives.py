"""One small prefix index through a long life: under its cap, claiming nothing that nobody said, leaking nothing."""

from __future__ import annotations

import random

import pytest

from gateway.routing.bets import Speculation
from gateway.routing.prefix_index import NO_MATCH, PrefixIndex
from tests.support.routing_chains import ENDPOINTS, Path, chain_of, name_of

SMALL_BYTES = 40_000  # some hundred blocks
LANES = ("gpu", "gpu", "gpu", "cpu", "disk")


class Life:
    """Random writing, and the union of all that was ever confirmed and not removed since."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.index = PrefixIndex(SMALL_BYTES)
        self.now = 0.0
        self.bets: list[Speculation] = []
        self.said: dict[str, set[Path]] = {endpoint_id: set() for endpoint_id in ENDPOINTS}

    def path(self) -> Path:
        """Of a bushy tree: 9 first blocks, then mostly the same way on."""
        first = self.chance.randrange(9)
        return (first, *(self.chance.choice((0, 0, 0, 1)) for _ in range(self.chance.randrange(14))))

    def step(self) -> None:
        endpoint_id, path, kind = self.chance.choice(ENDPOINTS), self.path(), self.chance.random()
        if kind < 0.45:
            start = self.chance.randrange(len(path)) if self.chance.random() < 0.3 else 0
            num_stored = self.index.store(endpoint_id, chain_of(path)[start:], self.chance.choice(LANES),
                                          parent=name_of(path[:start]) if start else None)
            self.said[endpoint_id] |= {path[:start + number + 1] for number in range(num_stored)}
        elif kind < 0.70:
            self.index.remove(endpoint_id, [name_of(path)], self.chance.choice(LANES))
        elif kind < 0.90:
            blocks_max = self.chance.choice((None, None, 5, 30))
            self.bets.append(self.index.speculate(endpoint_id, chain_of(path), self.now + self.chance.random() * 40,
                                                  blocks_max=blocks_max))
        elif kind < 0.96 and self.bets:
            self.index.withdraw(self.bets.pop(self.chance.randrange(len(self.bets))))
        elif kind < 0.97:
            self.index.retire(endpoint_id)
            self.said[endpoint_id].clear()
        self.index.sweep(self.chance.choice((0, 1, 40)))
        self.now += 0.1

    def check(self) -> None:
        self.index.expire(self.now)
        self.index.check_invariants()
        assert self.index.memory_bytes() <= SMALL_BYTES
        for _ in range(20):
            path = self.path()
            for endpoint_id, match in self.index.match(chain_of(path), self.now).items():
                assert all(path[:length] in self.said[endpoint_id]
                           for length in range(1, match.confirmed_blocks + 1)), "a claim that nobody made"
                assert match >= NO_MATCH


def live(seed: int, num_steps: int) -> None:
    life = Life(seed)
    for number in range(num_steps):
        life.step()
        if number % 50 == 0:
            life.check()
    assert life.index.num_evicted_blocks > num_steps // 10, "the cap was never felt"
    for endpoint_id in ENDPOINTS:
        life.index.purge(endpoint_id)
    life.index.expire(1e9)
    life.index.check_invariants()
    assert life.index.num_blocks() == 0
    assert len(life.index._holdings.sets) == 2, "holder sets leak"


@pytest.mark.parametrize("seed", range(2))
def test_two_thousand_steps(seed: int) -> None:
    live(seed, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_ten_thousand_steps(seed: int) -> None:
    live(seed, 10_000)
