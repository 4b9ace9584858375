"""Real processes that reach for the last places in the same moment, over and over: each time exactly as many are kept
as there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gateway.shared.segment import Segment, new_segment_file

ROWS, ROUNDS = 4, 400

RACER = """
import sys
import time
from gateway.shared.row_table import RowTable
from gateway.shared.segment import Segment
from gateway.shared.shared_ledger import SharedLedger
from gateway.shared.shared_places import SharedPlaces

descriptor, row, rounds, sort = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
segment = Segment(descriptor)
table = RowTable(segment, segment.layout.lines, row)
places = SharedPlaces(table, table.column("m"))
ledger = SharedLedger(RowTable(segment, segment.layout.endpoints, row))
ledger.begin("w", "1")
race = table.column("race")
ARRIVED, KEPT = 0, 1
booked = []


def take(limit):
    if sort == "places":
        return places.take(limit)
    if not ledger.claim("w", "1", limit):
        return False
    booked.append(ledger.book("w", "1", prefill_tokens=1, context_tokens=1))
    return True


def give_back():
    places.give_back() if sort == "places" else booked.pop().release()


def all_are_here(at=table.at(race, ARRIVED)):
    table.add(race, ARRIVED, 1)
    mine = table.words[at + row]
    while min(table.words[at:at + table.num_rows].tolist()) < mine:
        time.sleep(0)


wrong = []
for number in range(rounds):
    limit = 1 + number % (2 * table.num_rows - 1)
    all_are_here()
    kept = take(limit) + take(limit)
    table.add(race, KEPT, kept)
    all_are_here()
    if table.total(race, KEPT) != limit:
        wrong.append((limit, table.total(race, KEPT)))
    all_are_here()
    table.add(race, KEPT, -kept)
    for _ in range(kept):
        give_back()
print(len(wrong), wrong[:5])
"""


@pytest.mark.parametrize("sort", ["places", "worker"])
def test_in_every_race_exactly_the_limit_is_kept(sort: str) -> None:
    segment_file = new_segment_file(ROWS)
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(segment_file), str(row), str(ROUNDS), sort],
                               pass_fds=[segment_file], stdout=subprocess.PIPE, text=True) for row in range(ROWS)]
    assert [racer.communicate(timeout=120)[0] for racer in racers] == ["0 []\n"] * ROWS
    Segment(segment_file).close()
