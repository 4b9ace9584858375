"""Stores of one block each, taken together, against the same one by one: two indices, of which nobody can tell which
is which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.bets import Speculation
from gateway.routing.prefix_index import PrefixIndex
from tests.support.routing_chains import ENDPOINTS, Path, chain_of, name_of

ROOMY_BYTES, SMALL_BYTES = 1 << 40, 12_000
NUM_STEPS = 60
KINDS = (*("ones",) * 8, *("store",) * 4, *("remove", "bet") * 2, "store on cpu", "withdraw", "retire")


class Writing:
    """What comes next: mostly chains that an endpoint holds and that grow, now and then what it does not hold."""

    def __init__(self, seed: int, index: PrefixIndex) -> None:
        self.chance = random.Random(seed)
        self.index = index
        self.paths: list[Path] = [(number,) for number in range(6)]
        self.bet_on = self.paths[0]

    def step(self) -> tuple[str, str, Any]:
        chance = self.chance
        kind, endpoint_id = chance.choice(KINDS), chance.choice(ENDPOINTS)
        held = [path for path in self.paths[-80:] if self.index.holds(endpoint_id, name_of(path))]
        self.near = held if held and chance.random() < 0.9 else self.paths[-20:]
        if kind == "ones":
            return kind, endpoint_id, [self.one() for _ in range(chance.randrange(1, 30))]
        if kind == "remove":
            return kind, endpoint_id, [chance.choice(self.near) for _ in range(chance.randrange(8))]
        if kind == "withdraw":
            return kind, endpoint_id, chance.randrange(6)
        if kind == "retire":
            return kind, endpoint_id, chance.random() < 0.3
        path = self.longer()
        if kind == "bet":
            self.bet_on = path
        return kind, endpoint_id, path

    def longer(self) -> Path:
        path = (*self.chance.choice(self.near), self.chance.randrange(25))
        self.paths.append(path)
        return path

    def one(self) -> tuple[int, int]:
        """A parent and a block, perhaps one that others of the same step go on from. Any name behind any other is
        what collisions look like, of a block with itself too."""
        if self.chance.random() < 0.02:
            return name_of(self.chance.choice(self.near)), name_of(self.chance.choice(self.paths[-20:]))
        path = self.bet_on if self.chance.random() < 0.02 and len(self.bet_on) > 1 else self.longer()
        if self.chance.random() < 0.3:
            self.near = [*self.near, path]
        return name_of(path[:-1]), name_of(path)


class Twin:
    """One index; `together` says how it stores."""

    def __init__(self, max_bytes: int, *, together: bool) -> None:
        self.index = PrefixIndex(max_bytes)
        self.together = together
        self.num_together = 0
        self.bets: list[Speculation] = []

    def step(self, kind: str, endpoint_id: str, what: Any) -> object:
        if kind == "ones":
            return self.ones(endpoint_id, [parent for parent, _ in what], [block_hash for _, block_hash in what])
        if kind.startswith("store"):
            return self.index.store(endpoint_id, chain_of(what), "cpu" if kind.endswith("cpu") else "gpu")
        if kind == "remove":
            return self.index.remove(endpoint_id, map(name_of, what))
        if kind == "bet":
            self.bets.append(self.index.speculate(endpoint_id, chain_of(what), 1.0))
        elif kind == "withdraw" and self.bets:
            self.index.withdraw(self.bets.pop(what % len(self.bets)))
        elif kind == "retire":
            self.index.retire(endpoint_id)
            while what and self.index.sweep(1):
                pass
        return None

    def ones(self, endpoint_id: str, parents: Sequence[int], hashes: Sequence[int]) -> list[int]:
        """How many were stored of each."""
        stored: list[int] = []
        while len(stored) < len(hashes):
            at = len(stored)
            if self.together:
                num_stored = self.index.store_each(endpoint_id, parents[at:], hashes[at:])
                self.num_together += num_stored
                stored += [1] * num_stored
                at += num_stored
            if at < len(hashes):
                stored.append(self.one(endpoint_id, parents[at], hashes[at]))
        return stored

    def one(self, endpoint_id: str, parent: int, block_hash: int) -> int:
        if self.together and self.index.store_next(endpoint_id, parent, block_hash):
            return 1
        if not self.index.holds(endpoint_id, parent):
            return 0
        return self.index.store(endpoint_id, [block_hash], parent=parent)

    def all_that_is_known(self) -> tuple[object, ...]:
        """By name, since ids are nobody's business."""
        index = self.index
        tree, sets, by_id = index._tree, index._holdings.sets, index._roster.by_id
        name = tree.names.key_of
        blocks = {name[block]: (name[tree.parent[block]], sets.claimed[tree.set_of[block]],
                                sets.reached[tree.set_of[block]]) for block in tree.blocks()}
        claims = {endpoint_id: (of.num_confirmed, of.num_unreached, {name[b]: n for b, n in of.references.items()},
                                {name[b] for b in of.stakes}) for endpoint_id, of in by_id.items()}
        return (blocks, claims, [name[leaf] for leaf in tree.leaves], len(sets), index.memory_bytes(),
                index.num_evicted_blocks, index.num_refused_blocks)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), max_bytes=st.sampled_from([ROOMY_BYTES, SMALL_BYTES]))
def test_together_is_as_one_by_one(seed: int, max_bytes: int) -> None:
    one_by_one, together = Twin(max_bytes, together=False), Twin(max_bytes, together=True)
    writing = Writing(seed, one_by_one.index)
    for _ in range(NUM_STEPS):
        step = writing.step()
        assert one_by_one.step(*step) == together.step(*step)
        together.index.check_invariants()
        assert one_by_one.all_that_is_known() == together.all_that_is_known()


def test_streams_of_one_worker_are_taken_together() -> None:
    """A chain that goes on within the batch and ids that are not in a row included; others' blocks are not."""
    twin = Twin(ROOMY_BYTES, together=True)
    streams = [(number,) for number in range(20)]
    for path in streams:
        twin.index.store("a", chain_of((*path, 1)))
    twin.index.remove("a", [name_of((*path, 1)) for path in streams[::2]])
    parents = [*map(name_of, streams), *(name_of((*path, 2)) for path in streams)]
    hashes = [*(name_of((*path, 2)) for path in streams), *(name_of((*path, 2, 3)) for path in streams)]
    assert twin.index.store_each("b", parents, hashes) == 0
    assert twin.index.store_each("a", parents, hashes) == 40
    twin.index.check_invariants()
    assert twin.index.match(chain_of((7, 2, 3)), 0.0)["a"].confirmed_blocks == 3
