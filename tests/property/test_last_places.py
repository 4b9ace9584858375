"""A worker's last places, claimed by several processes whose steps mix in any order: never more than there are, never
fewer while somebody wants one, nobody turned away for a booking that was not kept, nothing left of a killed one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.shared.row_table import RowTable
from gateway.shared.segment import Segment, new_segment_file
from gateway.shared.shared_ledger import SharedLedger
from gateway.shared.shared_places import HOLDING, SharedPlaces
from tests.support.interleaving import Claimant, SteppedSegment, run_all

ROWS = 4
Take, GiveBack = Callable[[int], bool], Callable[[], None]
Sort = Callable[[Segment, int], tuple[Take, GiveBack]]


def places_at(segment: Segment, row: int) -> tuple[Take, GiveBack]:
    table = RowTable(segment, segment.layout.lines, row)
    column = table.column("model")
    assert column is not None
    places = SharedPlaces(table, column)
    return places.take, places.give_back


def worker_at(segment: Segment, row: int) -> tuple[Take, GiveBack]:
    ledger, booked = SharedLedger(RowTable(segment, segment.layout.endpoints, row)), []
    ledger.begin("w", "1")

    def take(limit: int) -> bool:
        if not ledger.claim("w", "1", limit):
            return False
        booked.append(ledger.book("w", "1", prefill_tokens=1, context_tokens=1))
        return True

    return take, lambda: booked.pop().release()


@dataclass
class Try:
    """`most_seen`: what was held, and what others tried to get, at its highest since this one began."""

    row: int
    most_seen: int = 0


@dataclass
class Race:
    """What really is the case, told by the claimants themselves and by nobody's reading. `held` until one begins to
    give back, `leaving` from then on until it has."""

    limit: int
    held: list[int] = field(default_factory=lambda: [0] * ROWS)
    leaving: set[int] = field(default_factory=set)
    under_way: dict[int, Try] = field(default_factory=dict)
    refused: list[Try] = field(default_factory=list)
    most_held: int = 0

    def look(self) -> None:
        self.most_held = max(self.most_held, sum(self.held))
        counted = sum(self.held) + len(self.leaving) + len(self.under_way)
        for one in self.under_way.values():
            one.most_seen = max(one.most_seen, counted - 1)

    def work(self, row: int, take: Take, give_back: GiveBack, plan: str) -> Callable[[], None]:
        """`t` takes a place, `g` gives one back if there is one."""
        def run() -> None:
            for step in plan:
                if step == "t":
                    mine = self.under_way[row] = Try(row)
                    self.look()
                    is_kept = take(self.limit)
                    self.look()
                    del self.under_way[row]
                    self.held[row] += is_kept
                    if not is_kept:
                        self.refused.append(mine)
                elif self.held[row]:
                    self.held[row] -= 1
                    self.leaving.add(row)
                    give_back()
                    self.leaving.remove(row)
        return run


Started = tuple[Race, SteppedSegment, list[Claimant], Sequence[tuple[Take, GiveBack]]]


@contextmanager
def race(limit: int, plans: list[str], sort: Sort, *, never_waits: bool = False) -> Iterator[Started]:
    segment, found = SteppedSegment(new_segment_file(ROWS), never_waits=never_waits), Race(limit)
    sides = [sort(segment, row) for row in range(ROWS)]
    claimants = [Claimant(found.work(row, *sides[row], plan)) for row, plan in enumerate(plans)]
    try:
        yield found, segment, claimants, sides
    finally:
        for claimant in claimants:
            segment.moving = claimant
            claimant.kill()
        segment.close()


sorts = st.sampled_from([places_at, worker_at])
orders = st.randoms(use_true_random=False)
plans_of_takers = st.lists(st.sampled_from(["t", "t", "tt"]), min_size=2, max_size=ROWS)
plans_of_all = st.lists(st.text("ttg", min_size=1, max_size=4), min_size=2, max_size=ROWS)


@settings(max_examples=150)
@given(st.integers(0, 7), plans_of_takers, sorts, orders)
def test_as_many_as_there_are_places_are_kept_when_all_reach_at_once(
        limit: int, plans: list[str], sort: Sort, order: random.Random) -> None:
    with race(limit, plans, sort) as (found, segment, claimants, _):
        run_all(segment, claimants, order.randrange, found.look)
        assert sum(found.held) == min(limit, sum(map(len, plans)))


@settings(max_examples=150)
@given(st.integers(0, 5), plans_of_all, sorts, orders)
def test_nobody_is_turned_away_while_a_place_is_free(
        limit: int, plans: list[str], sort: Sort, order: random.Random) -> None:
    with race(limit, plans, sort) as (found, segment, claimants, sides):
        run_all(segment, claimants, order.randrange, found.look)
        assert found.most_held <= limit
        assert all(one.most_seen >= limit for one in found.refused)
        for _ in range(limit - sum(found.held)):
            assert sides[0][0](limit)
        assert not any(take(limit) for take, _ in sides)


@settings(max_examples=100)
@given(st.integers(1, 5), plans_of_all, sorts, orders, st.integers(1, 60))
def test_of_one_that_is_killed_at_any_step_nothing_is_left(
        limit: int, plans: list[str], sort: Sort, order: random.Random,
        killed_after: int) -> None:
    with race(limit, plans, sort) as (found, segment, claimants, sides):
        steps = iter(range(killed_after))

        def on_step() -> None:
            found.look()
            if next(steps, None) is None and not claimants[0].is_done:
                segment.moving = claimants[0]
                claimants[0].kill()
                found.under_way.pop(0, None)
                segment.moving = None
                segment.clear_row(0)
                found.held[0] = 0
                found.leaving.discard(0)

        run_all(segment, claimants, order.randrange, on_step)
        assert found.most_held <= limit
        segment.clear_row(0)
        for _ in range(limit - sum(found.held[1:])):
            assert sides[1][0](limit)
        assert not sides[2][0](limit)


@settings(max_examples=100)
@given(st.integers(0, 5), plans_of_all, sorts, orders)
def test_without_the_lock_there_are_still_never_too_many(
        limit: int, plans: list[str], sort: Sort, order: random.Random) -> None:
    with race(limit, plans, sort, never_waits=True) as (found, segment, claimants, _):
        run_all(segment, claimants, order.randrange, found.look)
        assert found.most_held <= limit


@pytest.mark.parametrize(("sort", "num_steps"), [(places_at, 1), (worker_at, ROWS + 1)])
def test_a_place_that_changes_hands_while_it_is_counted_is_not_counted_twice(sort: Sort, num_steps: int) -> None:
    """`num_steps` behind the lock the first row has been read; of a worker its life before that."""
    with race(2, ["tg", "t", "t"], sort) as (found, segment, claimants, _):
        giver, taker, counter = claimants

        def go_on(claimant: Claimant, until: Callable[[], bool]) -> None:
            run_all(segment, [claimant], lambda _: 0, found.look, until)

        go_on(giver, lambda: 0 in found.leaving)  # but it has written nothing yet
        go_on(counter, lambda: segment.holder is counter)
        for _ in range(num_steps):
            counter.step()
        go_on(giver, lambda: False)
        go_on(taker, lambda: not taker.may_go_on())
        run_all(segment, claimants, lambda _: 0, found.look)
        assert found.held == [0, 1, 1, 0]


def test_what_is_under_way_in_an_earlier_life_of_the_worker_takes_no_place() -> None:
    segment = Segment(new_segment_file(ROWS))
    first, second = (SharedLedger(RowTable(segment, segment.layout.endpoints, row)) for row in range(2))
    assert first.claim("w", "1", 1)
    first.book("w", "1", prefill_tokens=1, context_tokens=1)
    assert not second.claim("w", "1", 1)
    assert second.claim("w", "2", 1)
    segment.close()


def test_far_from_the_limit_nobody_asks_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment(new_segment_file(ROWS))
    sides = [sort(segment, row) for row in range(ROWS) for sort in (places_at, worker_at)]
    monkeypatch.setattr(Segment, "__enter__", lambda self: pytest.fail("the lock was taken"))
    assert all(take(2 * ROWS) for take, _ in sides)
    segment.close()


def test_the_race_notices_a_loser_that_lets_go_outside_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: count, look, and take back."""
    def take(self: SharedPlaces, limit: int) -> bool:
        self._table.add(self._column, HOLDING, 1)
        if self._table.total(self._column, HOLDING) <= limit:
            return True
        self._table.add(self._column, HOLDING, -1)
        return False

    monkeypatch.setattr(SharedPlaces, "take", take)
    fewest = 1
    for seed in range(50):
        with race(1, ["t", "t"], places_at) as (found, segment, claimants, _):
            run_all(segment, claimants, random.Random(seed).randrange, found.look)
            fewest = min(fewest, sum(found.held))
    assert fewest == 0, "both let go"
