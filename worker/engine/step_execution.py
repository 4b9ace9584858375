"""Runs one step plan, and finds out whose fault it is when the runner raises.

A batch that raises is run again share by share: only shares that fail alone too are given up, the tokens of the
others count. That costs one slow step; K/V written twice is the same. A batch that does not fit into memory is
nobody's fault: nothing of it counts, and the caller plans a smaller one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from worker.core.batch import SampledToken, ScheduledSequence, ScoredToken, StepPlan, StepResult
from worker.engine.model_runner import RunOutcome
from worker.model.sampler import SamplerRow
from worker.prompt.sampling_params import SamplingParams

PROBE_SEQ_ID = -1       # never a real sequence's
logger = logging.getLogger("headstart.engine")


class Runner(Protocol):
    """What ModelRunner does."""

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome: ...


@dataclass(frozen=True, slots=True)
class Execution:
    """A step's outcome. `out_of_memory` says why nothing of it counts; None: it does."""

    outcome: RunOutcome
    out_of_memory: str | None = None


def execute(runner: Runner, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> Execution:
    """Never raises for what the runner raised."""
    try:
        return Execution(runner.run(plan, rows))
    except Exception as error:
        if is_out_of_memory(error):
            return _too_large(plan, error)
        logger.exception("step %d of %d sequences failed", plan.step_id, len(plan.sequences))
        if len(plan.sequences) == 1:
            [share] = plan.sequences
            return Execution(failed_outcome(plan, {share.seq_id: _reason(error)}))
    return _execute_share_by_share(runner, plan, rows)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may help. PyTorch's allocator on the CPU has no error class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def probe(runner: Runner) -> str | None:
    """Whether the runner can still compute anything: one position that is written nowhere. Why not, or None."""
    share = ScheduledSequence(seq_id=PROBE_SEQ_ID, token_ids=(0,), start=0, block_table=(0,), write_from=1,
                              samples=True)
    row = SamplerRow(SamplingParams(temperature=0.0), choice=0, output_index=0, prompt_token_ids=(0,),
                     output_token_ids=())
    try:
        runner.run(StepPlan(0, (share,), num_tokens=1), {PROBE_SEQ_ID: row})
    except Exception as error:
        return _reason(error)
    return None


def failed_outcome(plan: StepPlan, errors: dict[int, str]) -> RunOutcome:
    """A step in which nothing but these errors came out."""
    return RunOutcome(StepResult(plan.step_id, failed=frozenset(errors)), 0.0, 0.0, errors)


def _execute_share_by_share(runner: Runner, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> Execution:
    sampled: dict[int, SampledToken] = {}
    errors: dict[int, str] = {}
    scored: dict[int, list[ScoredToken]] = {}
    pooled: dict[int, list[float]] = {}
    forward_s = sample_s = 0.0
    for share in plan.sequences:
        alone = replace(plan, sequences=(share,), num_tokens=len(share.token_ids))
        try:
            outcome = runner.run(alone, rows)
        except Exception as error:
            if is_out_of_memory(error):
                return _too_large(plan, error)
            logger.warning("step %d: sequence %d fails alone: %r", plan.step_id, share.seq_id, error)
            errors[share.seq_id] = _reason(error)
            continue
        sampled.update(outcome.result.sampled)
        errors.update(outcome.errors)
        scored.update(outcome.scored)
        pooled.update(outcome.pooled)
        forward_s += outcome.forward_s
        sample_s += outcome.sample_s
    result = StepResult(plan.step_id, sampled, frozenset(errors))
    return Execution(RunOutcome(result, forward_s, sample_s, errors, scored, pooled))


def _too_large(plan: StepPlan, error: Exception) -> Execution:
    logger.warning("step %d of %d sequences and %d positions does not fit into memory: %s", plan.step_id,
                   len(plan.sequences), plan.num_tokens, error)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Execution(failed_outcome(plan, {}), out_of_memory=f"{type(error).__name__}: {error}")


def _reason(error: Exception) -> str:
    return f"The engine could not compute this request: {type(error).__name__}: {error}"
