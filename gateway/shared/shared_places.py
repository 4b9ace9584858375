"""Places at the workers of one model over all processes of a gateway.

Owns: this process's counts in its row. Of processes that reach for the last place at once exactly one gets it
(row_table.py).
Turns: a free place goes to a process by lot, in proportion to what waits there, since each process has a queue of its
own and none can see who is first in the others.
"""

from __future__ import annotations

from gateway.admission.places import NOBODY_ELSEWHERE, Places, WaitingElsewhere
from gateway.shared.row_table import RowTable

HOLDING, WAITING, WAITING_BYTES = range(3)


class SharedPlaces(Places):
    """See Places; `num_holding` is this process's."""

    def __init__(self, table: RowTable, column: int) -> None:
        super().__init__()
        self._table = table
        self._column = column

    def take(self, limit: int) -> bool:
        """See Places."""
        if not self._table.add_within(self._column, HOLDING, limit):
            return False
        self.num_holding += 1
        return True

    def give_back(self) -> None:
        """See Places."""
        super().give_back()
        self._table.add(self._column, HOLDING, -1)

    def num_free(self, limit: int) -> int:
        """See Places."""
        return limit - self._table.total(self._column, HOLDING)

    def estimated(self, num_here: int) -> float:
        """See Places: as large a share of all as it is of those held here."""
        return num_here * self._table.total(self._column, HOLDING) / max(1, self.num_holding)

    def waits_here(self, num_requests: int, num_bytes: int) -> None:
        """See Places."""
        words, table = self._table.words, self._table
        words[table.own(self._column, WAITING)] = num_requests
        words[table.own(self._column, WAITING_BYTES)] = num_bytes

    def elsewhere(self) -> WaitingElsewhere:
        """See Places."""
        waiting = sum(self._table.elsewhere(self._column, WAITING))
        if not waiting:
            return NOBODY_ELSEWHERE
        return WaitingElsewhere(waiting, sum(self._table.elsewhere(self._column, WAITING_BYTES)))

    def next_turn(self, random_ratio: float) -> int | None:
        """See Places."""
        waiting = self._table.elsewhere(self._column, WAITING)
        others = sum(waiting)
        if not others:
            return None
        here = self._table.words[self._table.own(self._column, WAITING)]
        ticket = random_ratio * (others + here)
        for row, count in enumerate(waiting):
            if ticket < count:
                return row
            ticket -= count
        return None
