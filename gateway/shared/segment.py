"""The memory that the processes of one gateway share: its layout, who lives in which row, and the one tiny lock.

A row belongs to one process from its start to its end, and only that process writes there; readers sum over rows. The
supervisor alone hands rows out and zeroes the row of a process that has ended, so what it counted is gone with it.
What several processes write (names of columns, tenants' buckets, drains) is written under the lock. The kernel
takes the lock from a process that dies, and nobody waits longer than LOCK_WAIT_MAX_S: a process that was stopped at
the wrong moment must not stop the others, and one request too many is better than none.

Words are 64 bits, aligned, so no reader sees half a number. The file has no name and goes with the last process.
Must never: know what a column means.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash

WORD_BYTES = 8
MAGIC = 0x6865_6164_0001
ENDPOINTS_MAX = 4096
LINES_MAX = 256
TENANTS_MAX = 16_384
DRAINS_MAX = 1024
ENDPOINT_FIELDS = 8
LINE_FIELDS = 3
TENANT_FIELDS = 1
BUCKET_WORDS = 6
LOCK_WAIT_MAX_S = 0.05
_HEADER_WORDS = 16
_ROW_WORDS = 16


class OtherVersion(Exception):
    """The supervisor that made the segment laid it out differently."""


class RowState(IntEnum):
    """`serving`: it accepts connections. `leaving`: it finishes what it has and accepts none."""

    FREE = 0
    STARTING = 1
    SERVING = 2
    LEAVING = 3


@dataclass(frozen=True, slots=True)
class TableLayout:
    """One table's place: names first (a count and the names' keys), then [column][field][row]."""

    names_at: int
    cells_at: int
    columns_max: int
    fields: int


class Layout:
    """Where everything is, in words. The same numbers in every process that was told the same number of rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows_at = _HEADER_WORDS
        self.drains_at = self.rows_at + num_rows * _ROW_WORDS
        self._next = self.drains_at + DRAINS_MAX
        self.endpoints = self._table(ENDPOINTS_MAX, ENDPOINT_FIELDS)
        self.lines = self._table(LINES_MAX, LINE_FIELDS)
        self.tenants = self._table(TENANTS_MAX, TENANT_FIELDS)
        self.buckets_at = self._next
        self.num_words = self._next + TENANTS_MAX * BUCKET_WORDS

    def _table(self, columns_max: int, fields: int) -> TableLayout:
        names_at = self._next
        cells_at = names_at + 1 + columns_max
        self._next = cells_at + columns_max * fields * self.num_rows
        return TableLayout(names_at, cells_at, columns_max, fields)


def new_segment_file(num_rows: int) -> int:
    """A descriptor of a fresh segment, all zeros but its head. Pages that nobody touched cost nothing."""
    layout = Layout(num_rows)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headstart-gateway")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, layout.num_words * WORD_BYTES)
    os.pwrite(descriptor, np.array([MAGIC, num_rows, 0, layout.num_words], np.int64).tobytes(), 0)
    return descriptor


class Segment:
    """The mapped memory. `words` and `reals` are two views of the same bytes."""

    def __init__(self, descriptor: int) -> None:
        magic, num_rows, _, num_words = np.frombuffer(os.pread(descriptor, 4 * WORD_BYTES, 0), np.int64).tolist()
        self.layout = Layout(num_rows)
        if (magic, num_words) != (MAGIC, self.layout.num_words):
            raise OtherVersion("the shared memory is of another version of this program")
        self.num_rows = self.layout.num_rows
        self._descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, self.layout.num_words * WORD_BYTES))
        self.words = memory.cast("q")
        self.reals = memory.cast("d")
        self.array = np.frombuffer(memory, np.int64)

    def close(self) -> None:
        """Let go of the file; the memory goes with the last view of it."""
        os.close(self._descriptor)

    # ---- rows ----------------------------------------------------------------------------------------------------

    def begin_row(self, row: int, slot: int) -> None:
        """Hand a row to the process about to start. The supervisor's."""
        self.clear_row(row)
        self.words[self._row(row) + 2] = slot
        self.words[self._row(row) + 1] = RowState.STARTING

    def clear_row(self, row: int) -> None:
        """The process of this row has ended: nothing of it counts any more. The supervisor's."""
        at = self._row(row)
        self.array[at:at + _ROW_WORDS] = 0
        for table in (self.layout.endpoints, self.layout.lines, self.layout.tenants):
            used = int(self.words[table.names_at])
            size = used * table.fields * self.num_rows
            cells = self.array[table.cells_at:table.cells_at + size].reshape(used, table.fields, self.num_rows)
            cells[:, :, row] = 0

    def set_state(self, row: int, state: RowState) -> None:
        """A process's word about itself."""
        self.words[self._row(row) + 1] = state

    def state(self, row: int) -> RowState:
        """What the row's process last said."""
        return RowState(self.words[self._row(row) + 1])

    def slot(self, row: int) -> int:
        """The listening sockets that the row's process accepts from."""
        return self.words[self._row(row) + 2]

    def beat(self, row: int) -> None:
        """The row's event loop turns."""
        self.words[self._row(row) + 3] = time.monotonic_ns()

    def beat_age_s(self, row: int) -> float:
        """How long ago the row's event loop last turned."""
        return (time.monotonic_ns() - self.words[self._row(row) + 3]) / 1e9

    def saw_drains(self, row: int, count: int) -> None:
        """The row's process has taken in so many drains."""
        self.words[self._row(row) + 4] = count

    def drains_seen(self, row: int) -> int:
        """See saw_drains."""
        return self.words[self._row(row) + 4]

    def living(self) -> list[int]:
        """Rows whose process works, be it only to finish."""
        return [row for row in range(self.num_rows) if self.words[self._row(row) + 1] in (RowState.SERVING,
                                                                                          RowState.LEAVING)]

    def _row(self, row: int) -> int:
        return self.layout.rows_at + row * _ROW_WORDS

    # ---- lock ----------------------------------------------------------------------------------------------------

    @property
    def locked(self) -> Segment:
        """`with segment.locked:` alone among the processes, or, after LOCK_WAIT_MAX_S, as if. Never await inside."""
        return self

    def __enter__(self) -> None:
        if not self._try_lock():
            until = time.monotonic() + LOCK_WAIT_MAX_S
            while not self._try_lock() and time.monotonic() < until:
                time.sleep(0)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)  # harmless when the wait was over before the lock was ours

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError:
            return False
        return True


def key_of(name: str) -> int:
    """A name as a word that is never 0."""
    key = xxhash.xxh3_64_intdigest(name.encode())
    return (key if key < 1 << 63 else key - (1 << 64)) or 1
