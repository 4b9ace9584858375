"""What several processes count together: places, tenants' limits, drains; alone, in turns, and in a race."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.budget import Budget, Window
from gateway.admission.limits import Limit, Meters
from gateway.admission.tenants import Tenant, TenantLimits
from gateway.shared import drain_board
from gateway.shared import segment as segment_module
from gateway.shared.drain_board import DrainBoard
from gateway.shared.row_table import RowTable
from gateway.shared.segment import DRAINS_MAX, LINES_MAX, RowState, Segment, new_segment_file
from gateway.shared.shared_meters import ADVANCE_SHARE, SharedMeters
from gateway.shared.shared_places import SharedPlaces

ROWS = 4


@pytest.fixture
def segment() -> Iterator[Segment]:
    found = Segment(new_segment_file(ROWS))
    for row in range(ROWS):
        found.begin_row(row, row)
        found.set_state(row, RowState.SERVING)
    yield found
    found.close()


def places_of(segment: Segment, row: int) -> SharedPlaces:
    table = RowTable(segment, segment.layout.lines, row)
    column = table.column("model")
    assert column is not None
    return SharedPlaces(table, column)


def test_places_are_counted_over_all_and_a_cleared_row_gives_its_own_back(segment: Segment) -> None:
    places = [places_of(segment, row) for row in range(ROWS)]
    taken = [places[number % ROWS].take(10) for number in range(14)]
    assert taken == [True] * 10 + [False] * 4
    segment.clear_row(0)  # it held three
    assert [places[1].take(10) for _ in range(4)] == [True, True, True, False]
    places[1].give_back()
    assert places[2].take(10)
    places[3].give_back()
    places[3].give_back()
    with pytest.raises(AssertionError):
        places[3].give_back()


def test_turns_go_where_somebody_waits_in_proportion(segment: Segment) -> None:
    places = [places_of(segment, row) for row in range(ROWS)]
    assert places[0].next_turn(0.5) is None
    assert places[0].elsewhere() == (0, 0)
    places[0].waits_here(2, 200)
    places[1].waits_here(1, 100)
    places[3].waits_here(5, 500)
    assert places[0].elsewhere() == (6, 600)
    turns = [places[0].next_turn(number / 8) for number in range(8)]
    assert turns == [1, 3, 3, 3, 3, 3, None, None], "one, five and two wait"


@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.sampled_from(["enter", "leave", "prompt", "output"]),
                          st.floats(0, 20), st.integers(0, 90)), max_size=60),
       st.sampled_from([None, 3]), st.sampled_from([None, 6]), st.sampled_from([None, 100]),
       st.sampled_from([None, 150]))
def test_a_meter_in_pieces_is_the_meter_in_one(steps: list[tuple[int, str, float, int]], concurrent: int | None,
                                               requests: int | None, tokens: int | None,
                                               budget_tokens: int | None) -> None:
    segment, now = Segment(new_segment_file(ROWS)), 1.0
    limits = TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens, max_concurrent=concurrent,
                          budget=None if budget_tokens is None else Budget(budget_tokens, Window.HOUR))
    tenant = Tenant("t", b"t", limits=limits)
    almost_an_hour = 3500.0  # so that a new one may begin on the way
    pieces = [SharedMeters(segment, row, wall_offset_s=almost_an_hour) for row in range(ROWS)]
    whole = Meters(wall_offset_s=almost_an_hour)
    inside = [0] * ROWS
    whole.of(tenant, now)
    for row, action, later, amount in steps:
        now += later
        mine, reference = pieces[row].of(tenant, now), whole.of(tenant, now)
        if action == "enter":
            over, expected = mine.enter(now), reference.enter(now)
            assert (over is None) == (expected is None)
            assert over is None or expected is None or over.limit is expected.limit
            inside[row] += over is None
        elif action == "leave" and inside[row]:
            inside[row] -= 1
            mine.leave()
            reference.leave()
        elif action == "prompt":
            assert mine.take_prompt(amount, now) == reference.take_prompt(amount, now)
        elif action == "output":
            mine.take_output(amount, now)
            reference.take_output(amount, now)
    segment.close()


def test_a_large_bucket_is_advanced_in_small_parts_and_never_given_twice(segment: Segment) -> None:
    limits = TenantLimits(requests_per_minute=6000, tokens_per_minute=600_000)
    tenant = Tenant("t", b"t", limits=limits)
    meters = [SharedMeters(segment, row).of(tenant, 1.0) for row in range(ROWS)]
    admitted = taken = 0
    for number in range(8000):
        meter = meters[number % ROWS if number < 4000 else number % 2]
        admitted += meter.enter(1.0) is None
        taken += 100 * (meter.take_prompt(100, 1.0) is None)
    most_advanced = (ROWS - 1) * (1 / ADVANCE_SHARE)
    assert 6000 * (1 - most_advanced) <= admitted <= 6000
    assert 600_000 * (1 - most_advanced) - 100 * ROWS <= taken <= 600_000
    over = meters[0].enter(1.0)
    assert over is not None
    assert sum(meters[number % ROWS].enter(31.0) is None for number in range(4000)) <= 3000 + 6000 * most_advanced


def test_requests_inside_of_a_dead_process_are_outside(segment: Segment) -> None:
    tenant = Tenant("t", b"t", limits=TenantLimits(max_concurrent=2))
    first, second = SharedMeters(segment, 0).of(tenant, 1.0), SharedMeters(segment, 1).of(tenant, 1.0)
    assert first.enter(1.0) is None
    assert second.enter(1.0) is None
    over = second.enter(1.0)
    assert over is not None
    assert over.limit is Limit.CONCURRENCY
    segment.clear_row(0)
    assert second.enter(1.0) is None
    second.leave()
    second.leave()
    with pytest.raises(AssertionError):
        second.leave()


def test_a_drain_is_for_one_life_and_the_oldest_is_forgotten(segment: Segment) -> None:
    boards = [DrainBoard(segment, row) for row in range(ROWS)]
    assert not boards[1].holds("w", "1")
    assert boards[0].add("w", "1") == boards[1].count == 1
    assert boards[1].holds("w", "1")
    assert not boards[1].holds("w", "2")
    assert not boards[1].holds("w1", "")
    for number in range(DRAINS_MAX):
        boards[2].add("other", str(number))
    assert not boards[1].holds("w", "1")
    assert boards[1].holds("other", "0")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=20))
def test_of_a_drain_and_its_lifting_the_last_word_counts(words: list[tuple[str, bool]]) -> None:
    segment = Segment(new_segment_file(ROWS))
    board, other = DrainBoard(segment, 0), DrainBoard(segment, 1)
    last: dict[str, bool] = {}
    for number, (worker, is_drain) in enumerate(words, 1):
        assert (board.add if is_drain else board.lift)(worker, "1") == number
        last[worker] = is_drain
        for name in "ab":
            assert other.holds(name, "1") == last.get(name, False)
            assert other.is_lifted(name, "1") == (not last.get(name, True))
            assert not other.holds(name, "2")
            assert not other.is_lifted(name, "2")
    segment.close()


async def test_a_drain_is_waited_for_until_every_living_process_has_seen_it(
        segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_board, "SEEN_WITHIN_S", 0.1)
    boards = [DrainBoard(segment, row) for row in range(ROWS)]
    segment.clear_row(3)
    count = boards[0].add("w", "1")
    for board in boards[:2]:
        board.seen(count)
    assert not await boards[0].seen_by_all(count)
    boards[2].seen(count)
    assert await boards[0].seen_by_all(count)


def test_a_segment_laid_out_by_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = new_segment_file(ROWS)
    Segment(descriptor)
    monkeypatch.setattr(segment_module, "BUCKET_WORDS", segment_module.BUCKET_WORDS + 1)
    with pytest.raises(segment_module.OtherVersion):
        Segment(descriptor)
    os.close(descriptor)


def test_names_beyond_the_columns_get_none_and_known_ones_keep_theirs(segment: Segment) -> None:
    table = RowTable(segment, segment.layout.lines, 0)
    assert [table.column(str(number)) for number in range(LINES_MAX + 2)] == [*range(LINES_MAX), None, None]
    assert RowTable(segment, segment.layout.lines, 1).column("7") == 7


RACER = """
import sys
from gateway.admission.tenants import Tenant, TenantLimits
from gateway.shared.row_table import RowTable
from gateway.shared.segment import Segment
from gateway.shared.shared_meters import SharedMeters
from gateway.shared.shared_places import SharedPlaces

KEPT = 1
segment, row = Segment(int(sys.argv[1])), int(sys.argv[2])
table = RowTable(segment, segment.layout.lines, row)
column = table.column("m")
places = SharedPlaces(table, column)
meter = SharedMeters(segment, row).of(Tenant("t", b"t", limits=TenantLimits(max_concurrent=5)), 1.0)
kept_inside = table.column("kept inside")


def total_kept(column):
    # Of those who were let in: what is taken, looked at and put back is not counted here.
    # The rows are read one after another, so a reading counts only when the next one finds the same.
    at = table.at(column, KEPT)
    while (rows := table.words[at:at + table.num_rows].tolist()) != table.words[at:at + table.num_rows].tolist():
        pass
    return sum(rows)


print("ready", flush=True)
sys.stdin.readline()
most_kept = most_inside = entered = taken = 0
for number in range(4000):
    if places.take(5):
        taken += 1
        table.add(column, KEPT, 1)
        most_kept = max(most_kept, total_kept(column))
        if number % 7 or places.num_holding > 4:
            table.add(column, KEPT, -1)
            places.give_back()
    elif places.num_holding:
        table.add(column, KEPT, -1)
        places.give_back()
while places.num_holding:
    table.add(column, KEPT, -1)
    places.give_back()
for number in range(2000):
    if meter.enter(1.0) is None:
        entered += 1
        table.add(kept_inside, KEPT, 1)
        most_inside = max(most_inside, total_kept(kept_inside))
        if number % 3:
            table.add(kept_inside, KEPT, -1)
            meter.leave()
            entered -= 1
print(entered, most_kept, most_inside, taken, flush=True)
sys.stdin.readline()
"""


def test_four_processes_that_race_never_hold_more_than_the_limit() -> None:
    descriptor = new_segment_file(ROWS)
    segment = Segment(descriptor)
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(descriptor), str(row)], pass_fds=[descriptor],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for row in range(ROWS)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    found = [tuple(map(int, racer.stdout.readline().split())) for racer in racers if racer.stdout is not None]
    assert sum(entered for entered, *_ in found) == 5, "in the end exactly the limit is inside"
    assert max(most_kept for _, most_kept, _, _ in found) <= 5
    assert max(most_inside for _, _, most_inside, _ in found) == 5
    assert sum(taken for *_, taken in found) > 1000
    meter = SharedMeters(segment, 0).of(Tenant("t", b"t", limits=TenantLimits(max_concurrent=5)), 1.0)
    assert meter.enter(1.0) is not None
    for racer in racers:
        racer.communicate("end\n")
    for row in range(ROWS):
        segment.clear_row(row)
    assert meter.enter(1.0) is None
    segment.close()
