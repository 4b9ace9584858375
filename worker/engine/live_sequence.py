"""A sequence while the engine works on it: what was asked, what came out, and where its time went.

Owns the engine's account of one sequence. The tokens that count and the positions computed are core's (`sequence`);
nothing here writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.core.batch import FinishReason, Preemption, ScheduledSequence, ScoredToken, SequenceUpdate
from worker.core.sequence import Sequence
from worker.engine.grammar import Matcher
from worker.engine.messages import SequenceOutput, SequenceStats, SubmitSequence
from worker.engine.timings import SequenceTimings, StepTiming
from worker.model.sampler import SamplerRow


@dataclass(slots=True)
class LiveSequence:
    """From submission to last report. Positions below `lost_until` were computed once and lost to a preemption."""

    command: SubmitSequence
    sequence: Sequence
    timings: SequenceTimings
    matcher: Matcher | None = None
    output_token_ids: list[int] = field(default_factory=list)
    lost_until: int = 0
    prompt_scores: dict[int, ScoredToken] = field(default_factory=dict)
    hidden_sum: list[float] | None = None
    prompt_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.command.prompt_token_ids

    def preempted(self, preemption: Preemption) -> None:
        self.lost_until = max(self.lost_until, preemption.num_tokens_lost)

    def is_recompute(self, share: ScheduledSequence) -> bool:
        return share.start < self.lost_until

    def is_decode(self, share: ScheduledSequence) -> bool:
        """A share that goes on from an output token (with `kv_cache` off it is the whole sequence)."""
        return len(self.output_token_ids) > self.command.num_generated and not self.is_recompute(share)

    def worked(self, share: ScheduledSequence, timing: StepTiming) -> None:
        self.timings.worked(timing, recompute=self.is_recompute(share))

    def scored(self, share: ScheduledSequence, scores: Iterable[ScoredToken]) -> None:
        """Keep what a step found about the prompt, by position; computed again after a preemption they are equal."""
        self.prompt_scores.update(enumerate(scores, share.start + 1))

    def pooled(self, share: ScheduledSequence, hidden_sum: list[float] | None) -> None:
        """Add up; a share that begins at 0 begins anew, since a preempted sequence is computed from there."""
        if hidden_sum is None:
            return
        before = self.hidden_sum if share.start else None
        self.hidden_sum = hidden_sum if before is None else [a + b for a, b in zip(before, hidden_sum, strict=True)]

    def sampler_row(self) -> SamplerRow:
        return SamplerRow(params=self.command.params, choice=self.command.choice,
                          output_index=len(self.output_token_ids), prompt_token_ids=self.prompt_token_ids,
                          output_token_ids=self.output_token_ids,
                          banned_token_ids=tuple(self.sequence.banned_token_ids),
                          allowed=None if self.matcher is None else self.matcher.allowed)

    def output(self, update: SequenceUpdate, *, at: float, error: str | None = None) -> SequenceOutput:
        """Book what core says this sequence gained, and put it into the shell's words."""
        for token_id in update.token_ids:
            self.output_token_ids.append(token_id)
            self.timings.token(at)
        reason = update.finish_reason if error is None else FinishReason.ERROR
        if self.matcher is not None and reason is None:
            self.matcher.advance(update.token_ids)
        return SequenceOutput(
            request_id=self.command.request_id, choice=self.command.choice, token_ids=list(update.token_ids),
            logprobs=None if update.logprobs is None else list(update.logprobs), cached_tokens=update.cached_tokens,
            finish_reason=None if reason is None else str(reason), error=error,
            stats=None if reason is None else self.account(),
            prompt_scores=self._take_scores() if update.cached_tokens is not None else None,
            embedding=self._mean_hidden() if update.cached_tokens is not None else None)

    def _mean_hidden(self) -> list[float] | None:
        if self.hidden_sum is None:
            return None
        return [value / len(self.prompt_token_ids) for value in self.hidden_sum]

    def _take_scores(self) -> list[ScoredToken] | None:
        if self.command.params.prompt_logprobs is None:
            return None
        scores, self.prompt_scores = self.prompt_scores, {}
        return [scores[position] for position in range(1, len(self.prompt_token_ids))]

    def failed(self, error: str) -> SequenceOutput:
        """It ends here, for a reason of its own."""
        return SequenceOutput(self.command.request_id, self.command.choice, [], error=error,
                              finish_reason=str(FinishReason.ERROR), stats=self.account())

    def account(self) -> SequenceStats:
        sequence = self.sequence
        cached = sequence.num_cached_tokens or 0
        return SequenceStats(
            prompt_tokens=sequence.num_prompt_tokens, cached_tokens=cached,
            computed_tokens=min(sequence.num_computed_positions, sequence.num_prompt_tokens - cached),
            recomputed_tokens=sequence.num_recomputed_tokens,
            output_tokens=len(self.output_token_ids), preemptions=sequence.num_preemptions,
            phases=self.timings.phases(), inter_token_p50_s=self.timings.inter_token_p50_s(),
            inter_token_max_s=self.timings.inter_token_max_s())
