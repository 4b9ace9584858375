"""The load ledger over all processes of a gateway: this process's bookings in its row, sums over the rows.

Owns: this process's accounts in shared memory. What a booking is and when it gives back is routing.load_ledger's.
A cell is the epoch it counts for, then the figures of a LoadView as 64-bit floats (whole numbers are exact to 2**53).
Sums take in only what other processes have there in the same life of the worker, and an account whose life is over is
cut off from its cell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import add

import numpy as np

from gateway.routing.load_ledger import NO_LOAD, Account, LoadLedger, LoadView
from gateway.shared.row_table import RowTable
from gateway.shared.segment import ENDPOINT_FIELDS, key_of

EPOCH, FIGURES = 0, 1  # the first figure is num_inflight
NUM_FIGURES = len(LoadView._fields)
# Below this many cells a loop over lists is faster than numpy.
NUMPY_FROM_CELLS = 32
# What others had so long ago is as good as now for choosing: workers' own reports are far older.
OTHERS_FRESH_S = 0.005
_KINDS = tuple(type(value) for value in NO_LOAD)

assert FIGURES + NUM_FIGURES <= ENDPOINT_FIELDS, "a LoadView has more figures than a cell"


class SharedAccount(Account):
    """One endpoint's account whose figures are also in this process's row."""

    __slots__ = ("_at", "_stride", "_table", "column")

    def __init__(self, epoch: str, table: RowTable, column: int) -> None:
        super().__init__(epoch)
        self._table: RowTable | None = table
        self.column = column
        self._at = table.own(column, FIGURES)
        self._stride = table.num_rows
        self.changed()
        table.words[table.own(column, EPOCH)] = key_of(epoch)

    def changed(self) -> None:
        """See Account."""
        super().changed()
        if self._table is not None:
            reals, at = self._table.reals, self._at
            for figure in self.view():
                reals[at] = figure
                at += self._stride

    def claim(self, limit: int) -> bool:
        """See LoadLedger; as RowTable.add_within(), of the processes that know this life of the worker."""
        table, own = self._table, self._at
        assert table is not None, "a claim on a life that is over"
        reals, at, rows = table.reals, own - table.row, table.num_rows
        reals[own] = self.num_inflight + 1
        if sum(reals[at:at + rows].tolist()) <= limit - rows:
            return True
        with table.locked:
            epochs = table.words[table.at(self.column, EPOCH):at].tolist()
            counts = zip(table.settled(reals, at), epochs, strict=True)
            if sum(count for count, epoch in counts if epoch == epochs[table.row]) <= limit:
                return True
            reals[own] = self.num_inflight
        return False

    def close(self) -> None:
        """The cell is another life's from now on."""
        if self._table is not None:
            self._table.words[self._table.own(self.column, EPOCH)] = 0
            self._table = None


class SharedLedger(LoadLedger):
    """A LoadLedger whose loads are those of all processes.

    loads(), which every decision asks for, takes what others have from a look at most OTHERS_FRESH_S old; load()
    looks now.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self._table = table
        self._others: dict[str, LoadView] = {}
        self._looked_at = -math.inf

    def load(self, endpoint_id: str) -> LoadView:
        """See LoadLedger."""
        account = self._accounts.get(endpoint_id)
        if not isinstance(account, SharedAccount):
            return super().load(endpoint_id)
        others = self._look((endpoint_id,))
        return _plus(account.view(), others[endpoint_id]) if others else account.view()

    def loads(self) -> dict[str, LoadView]:
        """See LoadLedger."""
        now = time.monotonic()
        if now - self._looked_at > OTHERS_FRESH_S:
            self._others, self._looked_at = self._look(self._accounts), now
        loads = super().loads()
        for endpoint_id, others in self._others.items():
            if (own := loads.get(endpoint_id)) is not None:
                loads[endpoint_id] = _plus(own, others)
        return loads

    def claim(self, endpoint_id: str, epoch: str, limit: int) -> bool:
        """See LoadLedger."""
        account = self.begin(endpoint_id, epoch)
        if not isinstance(account, SharedAccount) or account.claim(limit):
            return True
        self._looked_at = -math.inf  # what loads() knew was too old
        return False

    def _open(self, endpoint_id: str, epoch: str) -> Account:
        self._others.pop(endpoint_id, None)
        column = self._table.column(endpoint_id)
        return super()._open(endpoint_id, epoch) if column is None else SharedAccount(epoch, self._table, column)

    def _look(self, endpoint_ids: Iterable[str]) -> dict[str, LoadView]:
        """What other rows have at these endpoints in the life that this one knows; only where there is anything."""
        columns = {endpoint_id: account.column for endpoint_id in endpoint_ids
                   if isinstance(account := self._accounts.get(endpoint_id), SharedAccount)}
        if len(columns) * self._table.num_rows >= NUMPY_FROM_CELLS:
            return self._look_at_many(columns)
        table, rows = self._table, self._table.num_rows
        found: dict[str, LoadView] = {}
        for endpoint_id, column in columns.items():
            at = table.at(column, EPOCH)
            epochs = table.words[at:at + rows].tolist()
            epoch, epochs[table.row] = epochs[table.row], 0
            if epoch not in epochs:
                continue
            cells = table.reals[at:at + (FIGURES + NUM_FIGURES) * rows].tolist()
            others = [row for row in range(rows) if epochs[row] == epoch]
            sums = [sum([cells[at + row] for row in others]) for at in range(FIGURES * rows, len(cells), rows)]
            if any(sums):
                found[endpoint_id] = _view(sums)
        return found

    def _look_at_many(self, columns: Mapping[str, int]) -> dict[str, LoadView]:
        cells = self._table.cells(1 + max(columns.values(), default=0))
        epochs, figures = cells[:, EPOCH, :], cells[:, FIGURES:FIGURES + NUM_FIGURES, :].view(np.float64)
        counts = epochs == epochs[:, self._table.row][:, np.newaxis]
        counts[:, self._table.row] = False
        sums = np.where(counts[:, np.newaxis, :], figures, 0.0).sum(axis=2)
        busy = np.flatnonzero(sums.any(axis=1)).tolist()
        by_column = dict(zip(busy, map(_view, sums[busy].tolist()), strict=True))
        return {endpoint_id: by_column[column] for endpoint_id, column in columns.items() if column in by_column}


def _view(figures: Sequence[float]) -> LoadView:
    return LoadView._make([kind(figure) for kind, figure in zip(_KINDS, figures, strict=True)])


def _plus(own: LoadView, others: LoadView) -> LoadView:
    return LoadView._make(map(add, own, others))
