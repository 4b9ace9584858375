"""The worker's block pool and scheduler, fit for a simulator: events without tokens, runs of decode steps at once.

Owns two subclasses that change cost, never behaviour: tests hold them equal to their parents step by step. They must
never decide anything that the parent does not.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.core.batch import StepPlan
from worker.core.block_content import BlockContent
from worker.core.block_pool import BlockPool
from worker.core.event_journal import EventJournal
from worker.core.scheduler import Refusal, Scheduler, SchedulerConfig
from worker.core.sequence import Sequence
from worker.protocol.block_hash import HashScheme
from worker.protocol.cache_events import CacheEvent


class Stored(NamedTuple):
    """A chain of blocks became findable behind `parent` (None: from the root on)."""

    parent: int | None
    hashes: list[int]


class Removed(NamedTuple):
    hashes: list[int]


class Cleared(NamedTuple):
    """Everything is gone."""


Change = Stored | Removed | Cleared


class HashJournal(EventJournal):
    """Keeps hashes alone. Our workers' hashes are the gateway's own, so its tokens would only be hashed again."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._changes: list[Change] = []
        self._last_serial: int | None = None

    def stored(self, content: BlockContent, serial: int, *, parent_hash: int | None,
               parent_serial: int | None) -> None:
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Stored) and self._last_serial == parent_serial:
            last.hashes.append(content.block_hash)
        else:
            self._changes.append(Stored(parent_hash, [content.block_hash]))
        self._last_serial = serial

    def removed(self, block_hash: int) -> None:
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Removed):
            last.hashes.append(block_hash)
        else:
            self._changes.append(Removed([block_hash]))

    def cleared(self) -> None:
        self._changes = [Cleared()]

    def take(self) -> list[CacheEvent]:
        raise AssertionError("a simulated worker's changes are taken with take_changes()")

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes


class SimPool(BlockPool):
    """A block pool with a hash journal, and a snapshot for gateways that lost an event."""

    def __init__(self, num_blocks: int, scheme: HashScheme) -> None:
        super().__init__(num_blocks, scheme.block_size, scheme)
        self.journal = HashJournal(scheme.block_size)
        self._journal = self.journal

    def snapshot(self) -> list[Change]:
        """Every findable block, parents before children."""
        seals = sorted((seal for seal in self._seals if seal is not None), key=lambda seal: seal.serial)
        story = HashJournal(self.block_size)
        for seal in seals:
            story.stored(seal.content, seal.serial, parent_hash=seal.parent_hash, parent_serial=seal.parent_serial)
        return story.take_changes()


class SimScheduler(Scheduler):
    """The scheduler, and a way over runs of steps in which every running sequence only gains one token.

    In such a step no block is taken, sealed or given back. So when one of them admitted nobody, the next cannot
    either: what an admission depends on (pool, running set, leaders, budget) is the same, until somebody is
    submitted.
    """

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        super().__init__(pool, config)
        self._nobody_fits = False   # the last step planned was a plain one and admitted nobody

    def submit(self, sequence: Sequence) -> Refusal | None:
        self._nobody_fits = False
        return super().submit(sequence)

    def schedule(self) -> StepPlan | None:
        num_waiting = len(self._waiting)
        is_plain = bool(num_waiting) and self._num_plain_steps() > 0
        plan = super().schedule()
        self._nobody_fits = is_plain and len(self._waiting) == num_waiting
        return plan

    def num_plain_steps(self) -> int:
        """How many of the next steps would only append one token to each running sequence: nobody is admitted, needs
        a block, seals one, ends, or has a prompt to compute. 0 when the next step is none of these."""
        if self._in_flight is not None or (len(self._waiting) and not self._nobody_fits):
            return 0
        return self._num_plain_steps()

    def _num_plain_steps(self) -> int:
        if not self._running:
            return 0
        block_size = self.pool.block_size
        num_steps = 1 << 30
        for sequence in self._running.values():
            computed, num_tokens = sequence.num_computed_tokens, len(sequence.token_ids)
            if num_tokens - computed != 1 or num_tokens == sequence.num_prompt_tokens:
                return 0
            until_seal = block_size - 1 - computed % block_size
            until_end = sequence.stop_rule.max_new_tokens - (num_tokens - sequence.num_prompt_tokens) - 1
            room = len(sequence.block_table) * block_size - computed
            steps = min(until_seal, until_end, room)
            if steps < num_steps:
                if steps <= 0:
                    return 0
                num_steps = steps
        return num_steps

    def skip_plain_steps(self, num_steps: int, token_of: dict[int, int]) -> None:
        """As `num_steps` times schedule() and commit(), each sampling token_of[seq_id]."""
        for sequence in self._running.values():
            tokens = [token_of[sequence.seq_id]] * num_steps
            sequence.token_ids += tokens
            if sequence.chain is not None:
                sequence.chain.append(tokens)
            sequence.advance(num_steps)
        self.counters.steps += num_steps
        self.counters.computed_positions += num_steps * len(self._running)
        self._num_steps_planned += num_steps
