"""Carries a step plan to the model and the tokens back. The only place where worker.core and worker.model meet.

Owns the model and its KV storage. Decides nothing: what to compute comes from the scheduler, how to choose a token
from the sampler. Never touches the pool; a plan that raises here has changed no state but K/V nobody can find yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from worker.core.batch import SampledToken, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from worker.model.forward_batch import ForwardBatch, SequenceRows
from worker.model.kv_storage import KVStorage
from worker.model.paged_model import PagedModel
from worker.model.sampler import Sample, SamplerRow, sample


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A step's tokens, and the seconds its two halves took."""

    result: StepResult
    forward_s: float
    sample_s: float


class ModelRunner:
    """Runs one plan at a time. `clock` gives monotonic seconds."""

    def __init__(self, model: PagedModel, storage: KVStorage, clock: Callable[[], float]) -> None:
        self._model = model
        self._storage = storage
        self._clock = clock
        self._is_cuda = model.spec.device.startswith("cuda")

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        """Compute every share and choose a token for each that samples; `rows` has a row for each of those."""
        started_at = self._clock()
        logits = self._forward(plan)
        computed_at = self._clock()
        sampling = [share.seq_id for share in plan.sequences if share.samples]
        samples = sample(logits, [rows[seq_id] for seq_id in sampling]) if sampling else []
        sampled = {seq_id: _sampled_token(chosen, rows[seq_id])
                   for seq_id, chosen in zip(sampling, samples, strict=True)}
        ended_at = self._clock()
        return RunOutcome(StepResult(plan.step_id, sampled), computed_at - started_at, ended_at - computed_at)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> torch.Tensor:
        logits = self._model.forward(ForwardBatch(tuple(_rows(share) for share in plan.sequences)), self._storage)
        if self._is_cuda:
            torch.cuda.synchronize()    # kernels run behind our back: without this the sampler is billed for them
        return logits


def _rows(share: ScheduledSequence) -> SequenceRows:
    return SequenceRows(token_ids=share.token_ids, start=share.start, block_table=share.block_table,
                        write_from=share.write_from, wants_logits=share.samples)


def _sampled_token(chosen: Sample, row: SamplerRow) -> SampledToken:
    if row.params.logprobs is None or chosen.logprob is None:
        return SampledToken(chosen.token_id)
    return SampledToken(chosen.token_id, TokenLogprobs(chosen.logprob, chosen.top))
