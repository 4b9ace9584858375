"""A step while it is being put together: what is left of the token budget, and the shares so far.

Owns one step's draft, from schedule()'s first line to its last. It never takes blocks and never decides who is next.
"""

from __future__ import annotations

from worker.core.batch import Preemption, ScheduledSequence, StepPlan
from worker.core.prefill_pace import TOKENS_MIN, PrefillPace
from worker.core.sequence import Sequence

SCORED_TOKENS_MAX = 128
"""Positions of one sequence in one step while its prompt is scored: each needs a row of logits as wide as the
vocabulary, which for 262,144 tokens is a megabyte."""


class StepDraft:
    """Filled by the scheduler; `plan()` freezes it.

    With a `pace`, prefill in a step in which somebody decodes is bounded in time too: TOKENS_MIN positions are what a
    share is worth having for, the first in prefill gets them in any case, and those who need no more may overdraw the
    time once.
    """

    def __init__(self, max_batch_tokens: int, block_size: int, pace: PrefillPace | None = None) -> None:
        self.num_tokens_left = max_batch_tokens
        self.preemptions: list[Preemption] = []
        self._pace = pace
        self._prefill_s_left = float("inf") if pace is None else pace.target_s
        self._has_decodes = self._has_prefill = False
        self._max_batch_tokens = max_batch_tokens
        self._block_size = block_size
        self._shares: dict[int, ScheduledSequence] = {}
        self._evicted_for: dict[int, int] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence has a share."""
        return sequence.seq_id in self._shares

    def share_of(self, sequence: Sequence) -> int:
        """How many positions the budget still allows the sequence in this step."""
        num_remaining = sequence.num_remaining_tokens
        if sequence.scores_prompt:
            num_remaining = min(num_remaining, SCORED_TOKENS_MAX)
        return self.share(sequence.num_computed_tokens, num_remaining)

    def share(self, start: int, num_remaining: int) -> int:
        """How many of `num_remaining` positions from `start` on the budget still allows."""
        num_tokens = min(num_remaining, self.num_tokens_left)
        if self._pace is None or not self._has_decodes or num_remaining == 1:
            return num_tokens
        in_time = self._pace.tokens_within(self._prefill_s_left, start)
        if in_time < TOKENS_MIN:
            is_small = num_remaining <= TOKENS_MIN and self._prefill_s_left > -self._pace.target_s
            in_time = TOKENS_MIN if is_small or not self._has_prefill else 0
        return min(num_tokens, in_time)

    def add(self, sequence: Sequence) -> None:
        """Give the sequence its share; its block table must cover it."""
        num_tokens = self.share_of(sequence)
        start = sequence.num_computed_tokens
        end = start + num_tokens
        num_blocks = -(-end // self._block_size)
        assert num_tokens > 0, "a share computes something"
        assert sequence not in self, "one share a step"
        assert num_blocks <= len(sequence.block_table), "the block table covers the share"
        self._shares[sequence.seq_id] = ScheduledSequence(
            seq_id=sequence.seq_id,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            block_table=tuple(sequence.block_table[:num_blocks]),
            write_from=sequence.num_sealed_blocks * self._block_size,
            samples=end == sequence.num_tokens,
            adapter=sequence.adapter,
            targets=tuple(sequence.token_ids[start + 1:min(end + 1, sequence.num_prompt_tokens)])
            if sequence.scores_prompt else (),
            pools=sequence.pools,
        )
        self.num_tokens_left -= num_tokens
        if sequence.num_remaining_tokens == 1:
            self._has_decodes = True
        else:
            self._has_prefill = True
            if self._pace is not None:
                self._prefill_s_left -= self._pace.seconds(start, num_tokens)

    def note_evictions(self, sequence: Sequence, num_blocks: int) -> None:
        """`num_blocks` cached blocks went to make room for the sequence."""
        if num_blocks:
            self._evicted_for[sequence.seq_id] = self._evicted_for.get(sequence.seq_id, 0) + num_blocks

    def plan(self, step_id: int) -> StepPlan | None:
        """The finished step; None when nobody has a share."""
        if not self._shares:
            return None
        needed_most = max(self._evicted_for, key=lambda seq_id: self._evicted_for[seq_id], default=None)
        return StepPlan(
            step_id=step_id,
            sequences=tuple(self._shares.values()),
            preemptions=tuple(self.preemptions),
            num_tokens=self._max_batch_tokens - self.num_tokens_left,
            num_blocks_evicted=sum(self._evicted_for.values()),
            evicted_for_seq_id=needed_most,
        )
