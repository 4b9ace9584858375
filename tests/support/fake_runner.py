"""A model runner without a model, whose K/V prove where they came from.

The K/V of a position are a digest of the K/V before it, of its token and of its extra keys, as a real model's depend
on everything before. They are read from and written to an array keyed by (block, slot). So a wrong block, a stale
one, or one that is read before it was written, shows at the first position that uses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from worker.core.batch import SampledToken, ScheduledSequence, StepPlan, StepResult
from worker.protocol.block_hash import ExtraKey

GARBAGE = -1


class WrongContent(AssertionError):
    """A position reads K/V that were not computed from its own prefix."""


def prefix_digests(token_ids: Sequence[int], extra_keys: Iterable[ExtraKey]) -> list[int]:
    """The true K/V of each position, straight from the tokens. Stable across processes."""
    salts = {key.start: zlib.crc32(bytes([key.kind]) + key.value) for key in extra_keys}
    digest, digests = 1, []
    for position, token_id in enumerate(token_ids):
        digest = hash((digest, token_id, salts.get(position, 0)))
        digests.append(digest)
    return digests


def next_token(digest: int, vocabulary: int) -> int:
    """The token a prefix is followed by."""
    return (digest >> 7) % vocabulary


def reference_output(token_ids: Sequence[int], extra_keys: Sequence[ExtraKey], num_tokens: int,
                     vocabulary: int) -> list[int]:
    """What the model says after a prompt, computed without any cache."""
    text = list(token_ids)
    for _ in range(num_tokens):
        text.append(next_token(prefix_digests(text, extra_keys)[-1], vocabulary))
    return text[len(token_ids):]


class FakeRunner:
    """`sequences` maps seq_id to (token ids as they grow, extra keys): the test's own knowledge, not the plan's."""

    def __init__(self, block_size: int, vocabulary: int) -> None:
        self._block_size = block_size
        self._vocabulary = vocabulary
        self._storage: dict[tuple[int, int], int] = {}
        self.num_positions_computed = 0
        self.num_positions_read = 0

    def execute(self, plan: StepPlan, truth: dict[int, list[int]]) -> StepResult:
        """Compute the plan; `truth` holds each sequence's digests up to its present length."""
        for share in plan.sequences:
            self._check_reads(share, truth[share.seq_id])
        written = [slot for share in plan.sequences for slot in self._writes(share)]
        assert len(set(written)) == len(written), "two shares write one slot in the same step"
        for share in plan.sequences:
            for position in range(max(share.start, share.write_from), share.start + len(share.token_ids)):
                self._storage[self._slot(share, position)] = truth[share.seq_id][position]
            self.num_positions_computed += len(share.token_ids)
        return StepResult(plan.step_id, {
            share.seq_id: SampledToken(next_token(truth[share.seq_id][-1], self._vocabulary))
            for share in plan.sequences if share.samples
        })

    def break_down(self, plan: StepPlan) -> None:
        """Die half-way: every slot the plan would write holds nonsense."""
        for share in plan.sequences:
            for slot in self._writes(share):
                self._storage[slot] = GARBAGE

    def _check_reads(self, share: ScheduledSequence, truth: list[int]) -> None:
        """All before the share, and in it whatever is not written because it is sealed already."""
        end = share.start + len(share.token_ids)
        assert not share.samples or end == len(truth), "samples from a position that is not the last"
        for position in [*range(share.start), *range(share.start, min(share.write_from, end))]:
            self.num_positions_read += 1
            if self._storage.get(self._slot(share, position)) != truth[position]:
                raise WrongContent(f"sequence {share.seq_id}, position {position}, block table {share.block_table}")

    def _writes(self, share: ScheduledSequence) -> list[tuple[int, int]]:
        end = share.start + len(share.token_ids)
        return [self._slot(share, position) for position in range(max(share.start, share.write_from), end)]

    def _slot(self, share: ScheduledSequence, position: int) -> tuple[int, int]:
        return share.block_table[position // self._block_size], position % self._block_size
