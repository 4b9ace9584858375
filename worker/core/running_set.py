"""The sequences that run: in which order a step serves them, and who gives way when blocks run out.

Owns that order. It never takes or frees a block: the scheduler does.
"""

from __future__ import annotations

from collections import Counter

from worker.core.block_pool import BlockPool
from worker.core.sequence import Sequence
from worker.core.step_draft import StepDraft


class RunningSet(dict[int, Sequence]):
    """By sequence id, in the order of admission. After `max_preemptions` a sequence is never preempted again."""

    def __init__(self, max_preemptions: int) -> None:
        super().__init__()
        self._max_preemptions = max_preemptions

    @property
    def prefill_tokens(self) -> int:
        """Positions they have to compute before each can sample, decodes left out."""
        return sum(s.num_remaining_tokens for s in self.values() if s.num_remaining_tokens > 1)

    @property
    def decode_context_tokens(self) -> int:
        """Tokens whose K/V the decoding ones read in a step."""
        return sum(s.num_tokens for s in self.values() if s.num_remaining_tokens == 1)

    def ranked(self) -> list[Sequence]:
        """The most urgent first, then the first admitted."""
        return sorted(self.values(), key=lambda sequence: sequence.priority)

    def ranked_for_step(self, first_waiting: int | None) -> tuple[list[Sequence], list[Sequence]]:
        """Who is served before anybody is admitted, and who only after that: prefills that are less urgent than
        `first_waiting`, the priority of the first in the queue. Whoever needs one position only goes first of all."""
        ranked = sorted(self.ranked(), key=lambda sequence: sequence.num_remaining_tokens > 1)
        if first_waiting is None:
            return ranked, []
        after = [s for s in ranked if s.num_remaining_tokens > 1 and s.priority > first_waiting]
        return [sequence for sequence in ranked if sequence not in after] if after else ranked, after

    def is_protected(self, sequence: Sequence) -> bool:
        """Whether it was preempted often enough to own its blocks for good."""
        return sequence.num_preemptions >= self._max_preemptions

    def victim(self, needy: Sequence, draft: StepDraft, pool: BlockPool) -> Sequence:
        """The least urgent, last admitted one that frees a block; in the end the needy one itself.

        Passed over: who has a share already, who is protected, and who shares every block with others, since its
        going would gain nothing.
        """
        for candidate in reversed(self.ranked()):
            if candidate is needy:
                break
            if candidate in draft or self.is_protected(candidate):
                continue
            if pool.num_held_alone(candidate.block_table):
                return candidate
        return needy

    def check_invariants(self, block_size: int) -> Counter[int]:
        """AssertionError when a sequence's accounts disagree. How many of them hold each block."""
        holders: Counter[int] = Counter()
        for sequence in self.values():
            holders.update(sequence.block_table)
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block is twice in one table"
            assert sequence.num_computed_tokens <= len(sequence.block_table) * block_size
            assert sequence.num_sealed_blocks * block_size <= sequence.num_computed_tokens + 1
            assert sequence.num_cached_tokens is not None
            assert 0 <= sequence.num_cached_tokens < sequence.num_prompt_tokens
        return holders
