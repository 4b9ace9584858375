"""Carries a step plan to the model and the tokens back. The only place where worker.core and worker.model meet.

Owns the model and its KV storage. Decides nothing: what to compute comes from the scheduler, how to choose a token
from the sampler. Never touches the pool; a plan that raises here has changed no state but K/V nobody can find yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from worker.core.batch import SampledToken, ScheduledSequence, ScoredToken, StepPlan, StepResult, TokenLogprobs
from worker.model.forward_batch import ForwardBatch, SequenceRows
from worker.model.kv_storage import KVStorage
from worker.model.paged_model import PagedModel
from worker.model.sampler import Sample, SamplerRow, sample
from worker.model.scorer import score

NOT_A_NUMBER = "The model's output for this request is no number (NaN or infinity), so no token can be chosen."
logger = logging.getLogger("headstart.engine")


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A step's tokens, and the seconds its two halves took.

    `errors` says of the result's `failed` sequences what was wrong with each. `scored` are tokens of prompts,
    `pooled` sums of hidden states.
    """

    result: StepResult
    forward_s: float
    sample_s: float
    errors: dict[int, str] = field(default_factory=dict)
    scored: dict[int, list[ScoredToken]] = field(default_factory=dict)
    pooled: dict[int, list[float]] = field(default_factory=dict)


class ModelRunner:
    """Runs one plan at a time. `clock` gives monotonic seconds."""

    def __init__(self, model: PagedModel, storage: KVStorage, clock: Callable[[], float]) -> None:
        self._model = model
        self._storage = storage
        self._clock = clock
        self._is_cuda = model.spec.device.startswith("cuda")

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        """Compute every share, choose a token for each that samples, score the targets; `rows` has a row for each."""
        started_at = self._clock()
        logits, pooled = self._forward(plan)
        computed_at = self._clock()
        logits, scored = _score_prompts(logits, plan, rows)
        sampled, errors = choose_tokens(logits, {share.seq_id: rows[share.seq_id]
                                                 for share in plan.sequences if share.samples})
        ended_at = self._clock()
        return RunOutcome(StepResult(plan.step_id, sampled, frozenset(errors)), computed_at - started_at,
                          ended_at - computed_at, errors, scored, pooled)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, dict[int, list[float]]]:
        sums: list[torch.Tensor] = []
        batch = ForwardBatch(tuple(_rows(share) for share in plan.sequences))
        logits = self._model.forward(batch, self._storage, sums)
        if self._is_cuda:
            torch.cuda.synchronize()    # kernels run behind our back: without this the sampler is billed for them
        pooling = [share.seq_id for share in plan.sequences if share.pools]
        return logits, {seq_id: each.tolist() for seq_id, each in zip(pooling, sums, strict=True)}


def _score_prompts(logits: torch.Tensor, plan: StepPlan,
                   rows: Mapping[int, SamplerRow]) -> tuple[torch.Tensor, dict[int, list[ScoredToken]]]:
    """The rows that are to be sampled from, and what became of the others."""
    if not any(share.targets for share in plan.sequences):
        return logits, {}
    sampled, scored, first = [], {}, 0
    for share in plan.sequences:
        if share.targets:
            end = first + len(share.targets)
            num_top = rows[share.seq_id].params.prompt_logprobs or 0
            scored[share.seq_id] = [ScoredToken(*each) for each in score(logits[first:end], share.targets, num_top)]
            first = end
        if share.samples:
            sampled.append(first)
            first += 1
    return logits[sampled], scored


def choose_tokens(logits: torch.Tensor, rows: Mapping[int, SamplerRow]) -> tuple[dict[int, SampledToken],
                                                                                dict[int, str]]:
    """A token for each row of `logits`, in the order of `rows`, by sequence id; and what went wrong with the others.

    A row that is no distribution (NaN, or infinite) or whose sampler raises fails alone.
    """
    if not rows:
        return {}, {}
    seq_ids = list(rows)
    best = logits.amax(dim=-1)      # a NaN anywhere in a row is its maximum
    good = [index for index, is_finite in enumerate(torch.isfinite(best).tolist()) if is_finite]
    errors = {seq_id: NOT_A_NUMBER for index, seq_id in enumerate(seq_ids) if index not in good}
    try:
        chosen = sample(logits if len(good) == len(seq_ids) else logits[good], [rows[seq_ids[i]] for i in good])
        samples: dict[int, Sample] = dict(zip((seq_ids[index] for index in good), chosen, strict=True))
    except Exception:
        logger.exception("sampling %d sequences failed; each is tried alone", len(good))
        samples = _sample_alone(logits, {seq_ids[index]: (index, rows[seq_ids[index]]) for index in good}, errors)
    return {seq_id: _sampled_token(found, rows[seq_id]) for seq_id, found in samples.items()}, errors


def _sample_alone(logits: torch.Tensor, rows: Mapping[int, tuple[int, SamplerRow]],
                  errors: dict[int, str]) -> dict[int, Sample]:
    samples = {}
    for seq_id, (index, row) in rows.items():
        try:
            [samples[seq_id]] = sample(logits[index:index + 1], [row])
        except Exception as error:
            errors[seq_id] = f"No token could be chosen for this request: {type(error).__name__}: {error}"
    return samples


def _rows(share: ScheduledSequence) -> SequenceRows:
    return SequenceRows(token_ids=share.token_ids, start=share.start, block_table=share.block_table,
                        write_from=share.write_from, wants_logits=share.samples, adapter=share.adapter,
                        num_scored=len(share.targets), pools=share.pools)


def _sampled_token(chosen: Sample, row: SamplerRow) -> SampledToken:
    if row.params.logprobs is None or chosen.logprob is None:
        return SampledToken(chosen.token_id)
    return SampledToken(chosen.token_id, TokenLogprobs(chosen.logprob, chosen.top))
