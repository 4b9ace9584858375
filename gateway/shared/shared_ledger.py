"""The load ledger over all processes of a gateway: this process's bookings in its row, sums over the rows.

Owns: this process's accounts in shared memory. What a booking is and when it gives back is routing.load_ledger's.
A cell carries the epoch it counts for: sums take in only what other processes have there in the same life of the
worker, and an account whose life is over is cut off from its cell.
"""

from __future__ import annotations

import numpy as np

from gateway.routing.load_ledger import NO_LOAD, Account, LoadLedger, LoadView
from gateway.shared.row_table import RowTable
from gateway.shared.segment import key_of

EPOCH, INFLIGHT, PREFILL, CONTEXT = range(4)
# Below this many words a loop over lists is faster than numpy.
NUMPY_FROM_WORDS = 256


class SharedAccount(Account):
    """One endpoint's account whose sums are also in this process's row."""

    __slots__ = ("_table", "column")

    def __init__(self, epoch: str, table: RowTable, column: int) -> None:
        super().__init__(epoch)
        self._table: RowTable | None = table
        self.column = column
        self._empty()
        table.words[table.own(column, EPOCH)] = key_of(epoch)

    def add(self, inflight: int, prefill_tokens: int, context_tokens: int) -> None:
        """See Account."""
        super().add(inflight, prefill_tokens, context_tokens)
        table = self._table
        if table is not None:
            words, at, rows = table.words, table.own(self.column, INFLIGHT), table.num_rows
            words[at] = self.num_inflight
            words[at + rows] = self.queued_prefill_tokens
            words[at + 2 * rows] = self.decode_context_tokens

    def close(self) -> None:
        """The cell is another life's from now on."""
        self._empty()
        self._table = None

    def _empty(self) -> None:
        if (table := self._table) is not None:
            for field in (EPOCH, INFLIGHT, PREFILL, CONTEXT):
                table.words[table.own(self.column, field)] = 0


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
        if len(self._accounts) * 4 * self._table.num_rows >= NUMPY_FROM_WORDS:
            return self._many()
        return {endpoint_id: self._sum(account) if isinstance(account, SharedAccount) else account.view()
                for endpoint_id, account in self._accounts.items()}

    def _open(self, endpoint_id: str, epoch: str) -> Account:
        column = self._table.column(endpoint_id)
        return super()._open(endpoint_id, epoch) if column is None else SharedAccount(epoch, self._table, column)

    def _sum(self, account: SharedAccount) -> LoadView:
        table, rows = self._table, self._table.num_rows
        at = table.at(account.column, EPOCH)
        cells = table.words[at:at + 4 * rows].tolist()
        epoch = cells[table.row]
        inflight = prefill = context = 0
        for row in range(rows):
            if cells[row] == epoch:
                inflight += cells[row + rows]
                prefill += cells[row + 2 * rows]
                context += cells[row + 3 * rows]
        return LoadView(inflight, prefill, context)

    def _many(self) -> dict[str, LoadView]:
        shared = {endpoint_id: account for endpoint_id, account in self._accounts.items()
                  if isinstance(account, SharedAccount)}
        cells = self._table.cells(1 + max((account.column for account in shared.values()), default=0))
        same_life = cells[:, EPOCH, :] == cells[:, EPOCH, self._table.row][:, np.newaxis]
        sums = np.where(same_life[:, np.newaxis, :], cells[:, 1:, :], 0).sum(axis=2).tolist()
        found = {endpoint_id: LoadView(*sums[account.column]) for endpoint_id, account in shared.items()}
        return found | {endpoint_id: account.view() for endpoint_id, account in self._accounts.items()
                        if endpoint_id not in found}
