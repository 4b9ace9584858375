"""Who waits to be admitted, for whom, and what they hold on to meanwhile.

Owns the waiting queue, the twin gate and the claims, and keeps the three in step: whoever leaves one leaves all. It
never admits anybody and never counts free blocks: the scheduler decides who fits.

A follower chases its leader here: while the leader's prefill goes on, chunk by chunk, each block it seals is claimed
in the next pass. When the leader has sealed all that both need, or has left, the follower goes on from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from worker.core.block_pool import BlockPool, Matchable
from worker.core.claims import Claims
from worker.core.scheduler_config import Batching, SchedulerConfig
from worker.core.sequence import Sequence
from worker.core.twins import TwinGate
from worker.core.waiting_queue import WaitingQueue

# Share of the pool that claims may cover.
CLAIMED_RATIO = 0.5
# Waiting sequences, from the front of the queue, that hold what they will hit although they cannot go yet.
PROTECTED_MAX = 16


class WaitingRoom:
    """`gate` is asked by the scheduler about running sequences too: both look at the same leaders."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.gate = TwinGate()
        self.claims = Claims(pool, int(CLAIMED_RATIO * pool.num_blocks))
        self._pool = pool
        self._queue = WaitingQueue(config.max_waiting)
        self._batch = StaticBatch(config.max_running) if config.batching is Batching.STATIC else None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        """First to be admitted first; the walk is over a copy."""
        return iter(self._queue)

    @property
    def is_full(self) -> bool:
        return self._queue.is_full

    @property
    def first_priority(self) -> int | None:
        """The urgency of who is first in the queue; None: nobody is."""
        first = self._queue.first
        return None if first is None else first.priority

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)
        self._note_uncached(sequence, len(self.claims.found(sequence).block_ids))

    def requeue(self, sequence: Sequence, *, num_sealed_blocks: int) -> None:
        """Back after a preemption, with `num_sealed_blocks` of its blocks left in the cache."""
        self._queue.requeue(sequence)
        self._note_uncached(sequence, num_sealed_blocks)

    def find(self, seq_id: int) -> Sequence | None:
        return next((sequence for sequence in self._queue if sequence.seq_id == seq_id), None)

    def admit(self, sequence: Sequence) -> None:
        """Out of the queue, to run."""
        self._queue.admit(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Out of the queue, to end."""
        self._queue.remove(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended and will not come back."""
        self.gate.forget(sequence)
        self.claims.drop(sequence)
        self._queue.forget(sequence)

    def candidates(self, running: Collection[int]) -> Iterator[Sequence]:
        """Who may be admitted now, in order."""
        return iter(self._queue) if self._batch is None else self._batch.candidates(self._queue, running)

    def look_up(self, sequence: Sequence, running: Collection[int]) -> Matchable | None:
        """What the sequence would hit if it were admitted now; None while a running one computes what it needs next.

        What is there is claimed either way.
        """
        self.claims.extend(sequence)
        if self.gate.still_held(sequence, running):
            return None
        found = self.claims.found(sequence)
        num_after_leader = self.gate.hold(sequence, found.block_ids)
        self._note_uncached(sequence, num_after_leader or len(found.block_ids))
        return found if num_after_leader is None else None

    def take_matched(self, sequence: Sequence) -> list[int]:
        """All blocks that the sequence hits, with a reference on each for the caller. It has left the queue."""
        held = self.claims.take(sequence)
        contents = [] if sequence.chain is None else sequence.chain.blocks[len(held):]
        self.gate.forget(sequence)
        return held + self._pool.match(contents, behind=held[-1] if held else None)

    def protect(self) -> None:
        """The first in the queue claim what they will hit, so that nobody evicts it before their turn."""
        for _, sequence in zip(range(PROTECTED_MAX), self._queue, strict=False):
            self.claims.extend(sequence)

    def give_up_a_claim(self, *, keep: Sequence | None = None) -> bool:
        """The last in the queue that claims something lets go; with `keep`, only those behind it. False: nobody."""
        for sequence in reversed(list(self._queue)):
            if sequence is keep:
                return False
            if sequence in self.claims:
                self.claims.drop(sequence)
                return True
        return False

    def give_up_claims(self) -> None:
        while self.give_up_a_claim():
            pass

    def _note_uncached(self, sequence: Sequence, num_cached_blocks: int) -> None:
        sequence.num_uncached_tokens = max(1, sequence.num_tokens - num_cached_blocks * self._pool.block_size)


class StaticBatch:
    """As servers did before continuous batching: a batch is formed when nothing runs, and runs to its end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: frozenset[int] = frozenset()

    def candidates(self, queue: WaitingQueue, running: Collection[int]) -> Iterator[Sequence]:
        """The members that wait still; a new batch of the first in the queue when none waits and none runs."""
        waiting = [sequence for sequence in queue if sequence.seq_id in self._members]
        if not waiting and not running:
            waiting = list(queue)[:self._size]
            self._members = frozenset(sequence.seq_id for sequence in waiting)
        return iter(waiting)
