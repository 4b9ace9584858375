"""The prefix index against a model of sets and lists, through its own methods."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.prefix_index import NO_MATCH, Match, PrefixIndex, Speculation
from tests.support.routing_chains import ENDPOINTS, Path, chain_of, name_of, paths, prefixes_of

ROOMY_BYTES = 1 << 40
FOREVER = 1 << 40
Lane = tuple[str, int]

endpoint_ids = st.sampled_from(ENDPOINTS)
lanes = st.sampled_from([("gpu", 0), ("cpu", 0), ("gpu", 1)])


@dataclass
class Bet:
    endpoint_id: str
    paths: set[Path]
    expires_at: int
    handle: Speculation
    is_history: bool = False


@dataclass
class NaiveIndex:
    """Every claim in the open: who holds what, how often, and which bets are open."""

    references: dict[tuple[str, Lane], Counter[Path]] = field(default_factory=dict)
    bets: list[Bet] = field(default_factory=list)

    def lane(self, endpoint_id: str, lane: Lane) -> Counter[Path]:
        return self.references.setdefault((endpoint_id, lane), Counter())

    def confirmed(self, endpoint_id: str) -> set[Path]:
        return {path for (owner, _), counts in self.references.items() if owner == endpoint_id
                for path, count in counts.items() if count}

    def fast(self, endpoint_id: str) -> set[Path]:
        return {path for (owner, (tier, _)), counts in self.references.items()
                if owner == endpoint_id and tier == "gpu" for path, count in counts.items() if count}

    def staked(self, endpoint_id: str) -> set[Path]:
        return {path for bet in self.bets if bet.endpoint_id == endpoint_id for path in bet.paths}

    def knows(self, path: Path) -> bool:
        """A block stays known while it or a block below it is claimed."""
        claimed = {held for endpoint_id in ENDPOINTS
                   for held in self.confirmed(endpoint_id) | self.staked(endpoint_id)}
        return any(held[:len(path)] == path for held in claimed)

    def store(self, endpoint_id: str, lane: Lane, stored: list[Path]) -> None:
        for path in stored:
            self.lane(endpoint_id, lane)[path] += 1
        for bet in self.bets:
            if bet.endpoint_id == endpoint_id:
                bet.paths -= set(stored)

    def match(self, path: Path) -> dict[str, Match]:
        matches = {}
        for endpoint_id in ENDPOINTS:
            confirmed = run_length(path, self.confirmed(endpoint_id))
            either = run_length(path, self.confirmed(endpoint_id) | self.staked(endpoint_id))
            fast = run_length(path, self.fast(endpoint_id))
            if either:
                matches[endpoint_id] = Match(confirmed, either - confirmed, confirmed - fast)
        return matches


def run_length(path: Path, held: set[Path]) -> int:
    length = 0
    while length < len(path) and path[:length + 1] in held:
        length += 1
    return length


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(ROOMY_BYTES)
        self.naive = NaiveIndex()
        self.now = 0
        self.asked: set[Path] = set()

    @rule(endpoint_id=endpoint_ids, path=paths, start=st.integers(0, 5), lane=lanes)
    def store(self, endpoint_id: str, path: Path, start: int, lane: Lane) -> None:
        start = min(start, len(path) - 1)
        parent = path[:start]
        stored = prefixes_of(path)[start:]
        self.asked.add(path)
        expected = len(stored) if not parent or self.naive.knows(parent) else 0
        while parent and not expected and self.index.sweep(1):
            pass
        num_stored = self.index.store(endpoint_id, chain_of(path)[start:], lane[0], group=lane[1],
                                      parent=name_of(parent) if parent else None)
        assert num_stored == expected
        if expected:
            self.naive.store(endpoint_id, lane, stored)

    @rule(endpoint_id=endpoint_ids, victims=st.lists(paths, min_size=1, max_size=4), lane=lanes)
    def remove(self, endpoint_id: str, victims: list[Path], lane: Lane) -> None:
        counts = self.naive.lane(endpoint_id, lane)
        expected = 0
        for path in victims:
            if counts[path]:
                counts[path] -= 1
                expected += 1
        assert self.index.remove(endpoint_id, map(name_of, victims), lane[0], group=lane[1]) == expected

    @rule(endpoint_id=endpoint_ids, data=st.data(), lane=lanes)
    def remove_held(self, endpoint_id: str, data: st.DataObject, lane: Lane) -> None:
        held = sorted(+self.naive.lane(endpoint_id, lane))
        if held:
            self.remove(endpoint_id, data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=6)), lane)

    @rule(endpoint_id=endpoint_ids, path=paths, ttl=st.integers(1, 5))
    def speculate(self, endpoint_id: str, path: Path, ttl: int) -> None:
        self.asked.add(path)
        handle = self.index.speculate(endpoint_id, chain_of(path), float(self.now + ttl))
        added = set(prefixes_of(path)) - self.naive.confirmed(endpoint_id)
        self.naive.bets.append(Bet(endpoint_id, added, self.now + ttl, handle))

    @rule(endpoint_id=endpoint_ids, path=paths, ttl=st.integers(1, 5), blocks_max=st.integers(1, 8))
    def remember(self, endpoint_id: str, path: Path, ttl: int, blocks_max: int) -> None:
        """A bet that stands in for events: beyond what the endpoint can hold the oldest of them go."""
        self.asked.add(path)
        handle = self.index.speculate(endpoint_id, chain_of(path), float(self.now + ttl), blocks_max=blocks_max)
        added = set(prefixes_of(path)) - self.naive.confirmed(endpoint_id)
        if not added:
            return
        self.naive.bets.append(Bet(endpoint_id, added, self.now + ttl, handle, is_history=True))
        history = [bet for bet in self.naive.bets if bet.endpoint_id == endpoint_id and bet.is_history]
        while len(history) > 1 and len(self.naive.staked(endpoint_id)) > blocks_max:
            self.naive.bets.remove(history.pop(0))

    @precondition(lambda self: self.naive.bets)
    @rule(data=st.data(), ttl=st.integers(1, 5))
    def hold(self, data: st.DataObject, ttl: int) -> None:
        """A request that waits at its worker: its bet stays until it is taken back."""
        bet = data.draw(st.sampled_from(self.naive.bets))
        bet.handle.hold(float(ttl))
        bet.expires_at = FOREVER

    @precondition(lambda self: self.naive.bets)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        bet = data.draw(st.sampled_from(self.naive.bets))
        self.index.withdraw(bet.handle)
        self.index.withdraw(bet.handle)
        self.naive.bets.remove(bet)

    @rule(elapsed=st.integers(1, 3))
    def wait(self, elapsed: int) -> None:
        self.now += elapsed
        self.naive.bets = [bet for bet in self.naive.bets if bet.expires_at > self.now]

    @rule(endpoint_id=endpoint_ids)
    def purge(self, endpoint_id: str) -> None:
        self.index.purge(endpoint_id)
        self.forget(endpoint_id)

    @rule(endpoint_id=endpoint_ids, num_steps=st.integers(0, 3))
    def retire(self, endpoint_id: str, num_steps: int) -> None:
        """The blocks go later, but from now on nothing matches; `store` sweeps to the end first, to be comparable."""
        self.index.retire(endpoint_id)
        for _ in range(num_steps):
            self.index.sweep(1)
        self.forget(endpoint_id)

    def forget(self, endpoint_id: str) -> None:
        for handle in [bet.handle for bet in self.naive.bets if bet.endpoint_id == endpoint_id]:
            self.index.withdraw(handle)
        self.naive.bets = [bet for bet in self.naive.bets if bet.endpoint_id != endpoint_id]
        self.naive.references = {key: counts for key, counts in self.naive.references.items()
                                 if key[0] != endpoint_id}

    @invariant()
    def matches_are_those_of_a_walk(self) -> None:
        for path in sorted(self.asked):
            assert self.index.match(chain_of(path), float(self.now)) == self.naive.match(path)

    @invariant()
    def counts_agree(self) -> None:
        self.index.expire(float(self.now))
        self.index.check_invariants()
        for endpoint_id in ENDPOINTS:
            confirmed = self.naive.confirmed(endpoint_id)
            assert self.index.num_blocks(endpoint_id) == len(confirmed)
            assert self.index.num_speculative_blocks(endpoint_id) == len(self.naive.staked(endpoint_id) - confirmed)
            assert all(self.index.holds(endpoint_id, name_of(path)) for path in confirmed)


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class LongPrefixIndexMachine(PrefixIndexMachine):
    """250 examples of 40 steps: ten thousand."""


TestTenThousandSteps = pytest.mark.slow(LongPrefixIndexMachine.TestCase)
TestTenThousandSteps.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(st.tuples(endpoint_ids, paths, st.sampled_from(["store", "speculate", "remove"])), max_size=60),
       room=st.integers(1, 12))
def test_a_small_index_stays_small_and_never_claims_too_much(
        steps: list[tuple[str, Path, str]], room: int) -> None:
    small = PrefixIndex(room * 500)
    roomy = PrefixIndex(ROOMY_BYTES)
    for endpoint_id, path, kind in steps:
        for index in (small, roomy):
            if kind == "store":
                index.store(endpoint_id, chain_of(path))
            elif kind == "speculate":
                index.speculate(endpoint_id, chain_of(path), 1.0)
            else:
                index.remove(endpoint_id, chain_of(path)[-1:])
        small.check_invariants()
        believed, true = small.match(chain_of(path), 0.0), roomy.match(chain_of(path), 0.0)
        # Bets may differ: what was evicted here is bet on again, and a bet outlives a removal that it never heard of.
        for endpoint_id, match in believed.items():
            assert match.confirmed_blocks <= true.get(endpoint_id, NO_MATCH).confirmed_blocks
