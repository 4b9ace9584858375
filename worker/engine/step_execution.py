"""Runs one step plan, and finds out whose fault it is when the runner raises.

A batch that raises is run again share by share: only shares that fail alone too are given up. When all succeed alone
(a passing trouble, or too large a batch) their tokens count. That costs one slow step; K/V written twice is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from worker.core.batch import SampledToken, StepPlan, StepResult
from worker.engine.model_runner import RunOutcome
from worker.model.sampler import SamplerRow

logger = logging.getLogger("headstart.engine")


class Runner(Protocol):
    """What ModelRunner does."""

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome: ...


@dataclass(frozen=True, slots=True)
class Execution:
    """A step's outcome; `errors` says, by sequence id, which shares could not be computed and why."""

    outcome: RunOutcome
    errors: dict[int, str] = field(default_factory=dict)


def execute(runner: Runner, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> Execution:
    """Never raises for what the runner raised."""
    try:
        return Execution(runner.run(plan, rows))
    except Exception as error:
        logger.exception("step %d of %d sequences failed", plan.step_id, len(plan.sequences))
        if len(plan.sequences) == 1:
            return Execution(_nothing(plan), {plan.sequences[0].seq_id: _reason(error)})
    return _execute_share_by_share(runner, plan, rows)


def _execute_share_by_share(runner: Runner, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> Execution:
    sampled: dict[int, SampledToken] = {}
    errors: dict[int, str] = {}
    forward_s = sample_s = 0.0
    for share in plan.sequences:
        alone = StepPlan(plan.step_id, (share,), num_tokens=len(share.token_ids))
        try:
            outcome = runner.run(alone, rows)
        except Exception as error:
            logger.warning("step %d: sequence %d fails alone: %r", plan.step_id, share.seq_id, error)
            errors[share.seq_id] = _reason(error)
            continue
        sampled.update(outcome.result.sampled)
        forward_s += outcome.forward_s
        sample_s += outcome.sample_s
    return Execution(RunOutcome(StepResult(plan.step_id, sampled), forward_s, sample_s), errors)


def _nothing(plan: StepPlan) -> RunOutcome:
    return RunOutcome(StepResult(plan.step_id), 0.0, 0.0)


def _reason(error: Exception) -> str:
    return f"The engine could not compute this request: {type(error).__name__}: {error}"
