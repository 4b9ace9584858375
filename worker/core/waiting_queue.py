"""Sequences that wait to be admitted, in the order in which they may be.

Owns that order and its bound: the smaller priority number first, then first come first served. A preempted sequence
returns to the place its arrival gives it, ahead of those that came later; it was admitted once, so the bound does not
count against it. Priority is strict: a steady stream of urgent sequences keeps the others waiting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from worker.core.sequence import Sequence

_Entry = tuple[int, int, Sequence]


class WaitingQueue:
    """At most `max_waiting` new sequences, and as many preempted ones as were running."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._entries: list[_Entry] = []
        self._arrivals: dict[int, int] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """First to be admitted first. The queue may change while it is walked: the walk is over a copy."""
        return iter([sequence for _, _, sequence in self._entries])

    @property
    def first(self) -> Sequence | None:
        return self._entries[0][2] if self._entries else None

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self._max_waiting

    def push(self, sequence: Sequence) -> None:
        assert not self.is_full, "ask is_full before pushing"
        self._arrivals[sequence.seq_id] = self._num_arrived
        self._num_arrived += 1
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence back that was taken out with remove() and has not ended."""
        insort(self._entries, (sequence.priority, self._arrivals[sequence.seq_id], sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, to run or to end."""
        arrival = self._arrivals[sequence.seq_id]
        at = bisect_left(self._entries, (sequence.priority, arrival))
        assert self._entries[at][2] is sequence, f"sequence {sequence.seq_id} does not wait"
        del self._entries[at]

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended and will not come back."""
        del self._arrivals[sequence.seq_id]
