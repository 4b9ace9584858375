"""The load ledger over all processes of a gateway: this process's bookings in its row, sums over the rows.

Owns: this process's accounts in shared memory. What a booking is and when it gives back is routing.load_ledger's.
A cell is the epoch it counts for, then the figures of a LoadView as 64-bit floats (whole numbers are exact to 2**53).
Sums take in only what other processes have there in the same life of the worker, and an account whose life is over is
cut off from its cell.
"""

from __future__ import annotations

import numpy as np

from gateway.routing.load_ledger import NO_LOAD, Account, LoadLedger, LoadView
from gateway.shared.row_table import RowTable
from gateway.shared.segment import ENDPOINT_FIELDS, key_of

EPOCH, FIGURES = 0, 1
NUM_FIGURES = len(LoadView._fields)
# Below this many words a loop over lists is faster than numpy.
NUMPY_FROM_WORDS = 512
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
        if self._table is not None:
            reals, at = self._table.reals, self._at
            for figure in self.view():
                reals[at] = figure
                at += self._stride

    def close(self) -> None:
        """The cell is another life's from now on."""
        if self._table is not None:
            self._table.words[self._table.own(self.column, EPOCH)] = 0
            self._table = None


class SharedLedger(LoadLedger):
    """A LoadLedger whose loads are those of all processes."""

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self._table = table

    def load(self, endpoint_id: str) -> LoadView:
        """See LoadLedger."""
        account = self._accounts.get(endpoint_id)
        if account is None:
            return NO_LOAD
        return self._sum(account) if isinstance(account, SharedAccount) else account.view()

    def loads(self) -> dict[str, LoadView]:
        """See LoadLedger."""
        if len(self._accounts) * ENDPOINT_FIELDS * self._table.num_rows >= NUMPY_FROM_WORDS:
            return self._many()
        return {endpoint_id: self._sum(account) if isinstance(account, SharedAccount) else account.view()
                for endpoint_id, account in self._accounts.items()}

    def _open(self, endpoint_id: str, epoch: str) -> Account:
        column = self._table.column(endpoint_id)
        return super()._open(endpoint_id, epoch) if column is None else SharedAccount(epoch, self._table, column)

    def _sum(self, account: SharedAccount) -> LoadView:
        """Its own figures, and those of other rows that have any."""
        own, table, rows = account.view(), self._table, self._table.num_rows
        at = table.at(account.column, EPOCH)
        epochs = table.words[at:at + rows].tolist()
        epoch = epochs[table.row]
        others = [row for row in range(rows) if epochs[row] == epoch and row != table.row]
        if not others:
            return own
        reals, sums = table.reals, [float(figure) for figure in own]
        for row in others:
            cell = at + rows + row
            for figure in range(NUM_FIGURES):
                sums[figure] += reals[cell]
                cell += rows
        return _view(sums)

    def _many(self) -> dict[str, LoadView]:
        shared = {endpoint_id: account for endpoint_id, account in self._accounts.items()
                  if isinstance(account, SharedAccount)}
        cells = self._table.cells(1 + max((account.column for account in shared.values()), default=0))
        epochs, figures = cells[:, EPOCH, :], cells[:, FIGURES:FIGURES + NUM_FIGURES, :].view(np.float64)
        same_life = epochs == epochs[:, self._table.row][:, np.newaxis]
        sums = np.where(same_life[:, np.newaxis, :], figures, 0.0).sum(axis=2).tolist()
        found = {endpoint_id: _view(sums[account.column]) for endpoint_id, account in shared.items()}
        return found | {endpoint_id: account.view() for endpoint_id, account in self._accounts.items()
                        if endpoint_id not in found}


def _view(figures: list[float]) -> LoadView:
    return LoadView._make([kind(figure) for kind, figure in zip(_KINDS, figures, strict=True)])
