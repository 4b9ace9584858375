"""Sequences that wait to be admitted, in the order in which they may be.

Owns that order and its bound: the smaller priority number first, then by turns of tenants, and of one tenant first
come first served. A tenant's next turn comes by the tokens it has asked for since anybody waited, so one with a long
line stands behind itself, not before others (start-time fair queueing). Who asked for less than others while somebody
waited may catch up, by CATCH_UP_TOKENS at most: what it asks for at once is not made to share. A preempted sequence
returns to the place that its turn gives it; it was admitted once, so the bound does not count against it. Priority is
strict: a steady stream of urgent sequences keeps the others waiting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from worker.core.sequence import Sequence

TENANTS_LOOK_AT = 256  # beyond so many it is looked whose turn is no later than anybody's
CATCH_UP_TOKENS = 8192  # some ten prompts; whoever is level waits for them
_Rank = tuple[int, int, int]


class WaitingQueue:
    """At most `max_waiting` new sequences, and as many preempted ones as were running."""

    def __init__(self, max_waiting: int, *, catch_up_tokens: int = CATCH_UP_TOKENS) -> None:
        self._max_waiting = max_waiting
        self._catch_up_tokens = catch_up_tokens
        self._entries: list[tuple[_Rank, Sequence]] = []
        self._ranks: dict[int, _Rank] = {}
        self._num_arrived = 0
        self._next_turns: dict[str | None, int] = {}
        self._present = self._latest = 0  # the turn of who was admitted last, and of who is last in line
        self._began = 0  # the present when somebody began to wait

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """First to be admitted first. The queue may change while it is walked: the walk is over a copy."""
        return iter([sequence for _, sequence in self._entries])

    @property
    def first(self) -> Sequence | None:
        return self._entries[0][1] if self._entries else None

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self._max_waiting

    def push(self, sequence: Sequence) -> None:
        assert not self.is_full, "ask is_full before pushing"
        self._ranks[sequence.seq_id] = (sequence.priority, self._turn_of(sequence), self._num_arrived)
        self._num_arrived += 1
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence back that was taken out with admit() and has not ended."""
        insort(self._entries, (self._ranks[sequence.seq_id], sequence), key=_rank)

    def admit(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, to run."""
        self._present = max(self._present, self._ranks[sequence.seq_id][1])
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, to end."""
        at = bisect_left(self._entries, self._ranks[sequence.seq_id], key=_rank)
        assert self._entries[at][1] is sequence, f"sequence {sequence.seq_id} does not wait"
        del self._entries[at]

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended and will not come back."""
        del self._ranks[sequence.seq_id]

    def _turn_of(self, sequence: Sequence) -> int:
        if not self._entries:  # nobody waits, so nobody is behind anybody
            self._next_turns.clear()
            self._began = self._present = self._latest
        elif len(self._next_turns) > TENANTS_LOOK_AT:
            self._next_turns = {tenant: at for tenant, at in self._next_turns.items() if at > self._earliest}
        turn = max(self._earliest, self._next_turns.get(sequence.tenant, 0))
        self._next_turns[sequence.tenant] = turn + sequence.num_tokens
        self._latest = max(self._latest, turn)
        return turn

    @property
    def _earliest(self) -> int:
        """The turn of a tenant that was away: it cannot have missed more than there was since somebody waits."""
        return max(self._began, self._present - self._catch_up_tokens)


def _rank(entry: tuple[_Rank, Sequence]) -> _Rank:
    return entry[0]
