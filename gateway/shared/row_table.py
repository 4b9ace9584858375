"""Counters by name in every process: a column for each name, a row for each process.

Owns: which column a name has. A name keeps its column for as long as the segment lives; beyond `columns_max` names a
new one gets none, and is then counted by each process for itself.

Limits: a process writes its own count first and looks at the others' then, so of several that reach for the last
place each sees whoever wrote before it, and they never keep too many. Whoever finds too many asks again under the
lock, and lets go there or not at all. So refusals come one after another, and the last that is refused saw only
counts that stay: they never keep too few. No reader needs to know which counts are undecided, a process that is
killed leaves no more than its row, and a lock not gained in time (segment.py) may cost a place, never give one away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gateway.shared.segment import Segment, TableLayout, key_of
from worker.protocol.logs import get_logger

# Read so often at most until two readings in a row are the same.
READINGS_MAX = 8
_log = get_logger(__name__)


class RowTable:
    """One table of the segment, as the process of `row` sees it."""

    def __init__(self, segment: Segment, layout: TableLayout, row: int) -> None:
        self._segment = segment
        self._layout = layout
        self._columns: dict[str, int | None] = {}
        self.words, self.reals = segment.words, segment.reals
        self.row = row
        self.num_rows = segment.num_rows

    def column(self, name: str) -> int | None:
        """The name's column, by now certainly; None when there are too many names."""
        if name in self._columns:
            return self._columns[name]
        key = key_of(name)
        with self._segment.locked:
            column = self._find_or_add(key)
        if column is None:
            _log.warning("shared_columns_exhausted", name=name, columns_max=self._layout.columns_max,
                         reason="each process now counts this name for itself",
                         remedy="restart the gateway, or use --processes 1")
            if len(self._columns) > 2 * self._layout.columns_max:
                return None  # remembering every name would be the leak that columns_max prevents
        self._columns[name] = column
        return column

    def at(self, column: int, field: int) -> int:
        """The word of row 0; the other rows follow it."""
        return self._layout.cells_at + (column * self._layout.fields + field) * self.num_rows

    def own(self, column: int, field: int) -> int:
        """This process's word."""
        return self.at(column, field) + self.row

    def add(self, column: int, field: int, amount: int) -> None:
        """Change this process's count."""
        self.words[self.at(column, field) + self.row] += amount

    def add_within(self, column: int, field: int, limit: int) -> bool:
        """Count one more here, unless that makes more than `limit` over all processes."""
        words, at = self.words, self.at(column, field)
        own = at + self.row
        words[own] += 1
        # Others may see a write a little later: so near the limit the lock decides, which is a barrier too.
        if sum(words[at:at + self.num_rows].tolist()) <= limit - self.num_rows:
            return True
        with self._segment.locked:
            if sum(self.settled(words, at)) <= limit:
                return True
            words[own] -= 1
        return False

    def settled(self, cells: memoryview[int] | memoryview[float], at: int) -> Sequence[float]:
        """All rows from `at` on as they were at one instant: what one gives back and another takes while they are
        read could be seen twice."""
        seen = cells[at:at + self.num_rows].tolist()
        for _ in range(READINGS_MAX):
            before, seen = seen, cells[at:at + self.num_rows].tolist()
            if before == seen:
                break
        return seen

    @property
    def locked(self) -> Segment:
        """See Segment."""
        return self._segment.locked

    def total(self, column: int, field: int) -> int:
        """The sum over all processes."""
        at = self.at(column, field)
        return sum(self.words[at:at + self.num_rows].tolist())

    def elsewhere(self, column: int, field: int) -> list[int]:
        """The counts by row, this process's as 0."""
        at = self.at(column, field)
        counts = self.words[at:at + self.num_rows].tolist()
        counts[self.row] = 0
        return counts

    def cells(self, num_columns: int) -> npt.NDArray[np.int64]:
        """The first columns as [column][field][row], live."""
        fields, start = self._layout.fields, self._layout.cells_at
        part = self._segment.array[start:start + num_columns * fields * self.num_rows]
        return part.reshape(num_columns, fields, self.num_rows)

    def _find_or_add(self, key: int) -> int | None:
        at, words = self._layout.names_at, self.words
        count = words[at]
        found = np.flatnonzero(self._segment.array[at + 1:at + 1 + count] == key)
        if len(found):
            return int(found[0])
        if count >= self._layout.columns_max:
            return None
        words[at + 1 + count] = key
        words[at] = count + 1
        return count
