"""What becomes of a step that raises: the culprit ends, its batch-mates go on, a broken engine says so."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import pytest
import torch

from tests.support.tiny_engine import GREEDY, EngineDriver, tokens
from worker.core.batch import StepPlan
from worker.engine.engine import FAILED_STEPS_MAX
from worker.engine.messages import ResetCache, SubmitSequence
from worker.engine.model_runner import NOT_A_NUMBER, ModelRunner, RunOutcome
from worker.engine.step_execution import Runner
from worker.model.forward_batch import ForwardBatch
from worker.model.kv_storage import KVStorage
from worker.model.paged_model import PagedModel
from worker.model.sampler import SamplerRow
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.cache_events import BlockStored


class PoisonedRunner:
    """Raises whenever a share of the plan starts with a poisoned token, as a runner with a bug for it would."""

    def __init__(self, runner: Runner, poison: int) -> None:
        self._runner = runner
        self._poison = poison
        self.num_failures = 0

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        if any(self._poison in share.token_ids for share in plan.sequences):
            self.num_failures += 1
            raise RuntimeError("poisoned")
        return self._runner.run(plan, rows)


class DeadRunner:
    """A runner whose device is gone."""

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        raise RuntimeError("device lost")


class NotANumberRunner:
    """The real model, whose logits turn into NaN for whoever ends with a poisoned token, as an overflow would."""

    def __init__(self, runner: Runner, poison: int) -> None:
        assert isinstance(runner, ModelRunner)
        self._runner, self._model, self._poison = runner, runner._model, poison
        self.num_runs = 0
        self.steps_before = 0

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        self.num_runs += 1
        if self.num_runs == 1:
            self.steps_before = plan.step_id
        sampling = [share for share in plan.sequences if share.samples]
        spoilt = [index for index, share in enumerate(sampling) if share.token_ids[-1] == self._poison]
        runner = copy(self._runner)
        runner._model = SpoilingModel(self._model, spoilt)  # type: ignore[assignment]
        return runner.run(plan, rows)


class SpoilingModel:
    def __init__(self, model: PagedModel, spoilt: list[int]) -> None:
        self._model, self._spoilt, self.spec = model, spoilt, model.spec

    def forward(self, batch: ForwardBatch, storage: KVStorage, *others: Any) -> torch.Tensor:
        logits = self._model.forward(batch, storage, *others).clone()
        logits[self._spoilt, 7] = torch.nan
        return logits


class SmallMemoryRunner:
    """The real runner on a device too small for more than `max_tokens` positions at once."""

    def __init__(self, runner: Runner, *, max_tokens: int, error: Exception) -> None:
        self._runner, self._max_tokens, self._error = runner, max_tokens, error
        self.num_refused = 0

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        if plan.num_tokens > self._max_tokens:
            self.num_refused += 1
            raise self._error
        return self._runner.run(plan, rows)


class BrokenMatcher:
    """A grammar whose library raises on the first token."""

    error = None
    allowed = None

    def advance(self, token_ids: list[int]) -> None:
        raise ValueError("the grammar's library broke down")


MATES = {"good": 31, "fine": 32}


def test_a_poisoned_request_does_not_take_its_batch_mates_along(driver: EngineDriver) -> None:
    expected = driver.generate(tokens(18, 40), 12).token_ids
    driver.engine.runner = poisoned = PoisonedRunner(driver.engine.runner, poison=1)
    driver.submit("good", tokens(18, 40), 12)
    driver.submit("bad", [*tokens(19, 20), 1, *tokens(22, 20)], 12)
    driver.submit("fine", tokens(23, 40), 12)
    driver.run()
    assert poisoned.num_failures > 0
    assert driver.results["good", 0].token_ids == expected
    assert driver.results["fine", 0].finish_reason == "length"
    bad = driver.results["bad", 0]
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "poisoned" in bad.error
    assert driver.engine.broken is None
    assert driver.stats.blocks_used == 0
    driver.engine.scheduler.check_invariants()


def test_nothing_of_a_failed_share_is_ever_served(driver: EngineDriver) -> None:
    """The poisoned prompt's blocks were never computed: a healthy runner must compute them afresh."""
    healthy = driver.engine.runner
    prompt = [*tokens(24, 60), 1, 5]
    driver.engine.runner = PoisonedRunner(healthy, poison=1)
    driver.submit("bad", prompt, 4)
    driver.submit("mate", tokens(25, 40), 4)
    driver.run()
    assert driver.results["bad", 0].finish_reason == "error"
    driver.engine.runner = healthy
    again = driver.generate(prompt, 4)
    assert again.cached_tokens == 0
    assert not any(isinstance(event, BlockStored) and 1 in event.token_ids for event in driver.events[:-1])


def test_any_number_of_poisoned_requests_in_a_row_leaves_the_engine_whole(driver: EngineDriver) -> None:
    driver.engine.runner = PoisonedRunner(driver.engine.runner, poison=1)
    for attempt in range(2 * FAILED_STEPS_MAX):
        driver.submit(f"bad-{attempt}", [1, 2, 3], 4)
        driver.step()
        bad = driver.results[f"bad-{attempt}", 0]
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert "poisoned" in bad.error
    assert driver.engine.broken is None
    assert driver.generate([5, 6, 7], 2).finish_reason == "length"


def test_a_runner_that_cannot_compute_anything_breaks_the_engine(driver: EngineDriver) -> None:
    driver.engine.runner = DeadRunner()
    for attempt in range(FAILED_STEPS_MAX):
        assert driver.engine.broken is None
        driver.submit(f"r-{attempt}", [4, 5, 6], 4)
        driver.step()
    assert driver.engine.broken is not None
    assert "device lost" in driver.engine.broken


# -- a row that fails alone ----------------------------------------------------------------------------------


def test_an_output_that_is_no_number_fails_its_own_request_alone(driver: EngineDriver) -> None:
    healthy = driver.engine.runner
    expected = {name: driver.generate(tokens(seed, 40), 12).token_ids for name, seed in MATES.items()}
    driver.engine.runner = runner = NotANumberRunner(healthy, poison=1)
    for name, seed in MATES.items():
        driver.submit(name, tokens(seed, 40), 12)
    driver.submit("bad", [*tokens(33, 20), 1], 12)
    driver.run()
    assert driver.results["bad", 0].finish_reason == "error"
    assert driver.results["bad", 0].error == NOT_A_NUMBER
    assert {name: driver.results[name, 0].token_ids for name in MATES} == expected
    assert runner.num_runs == driver.stats.steps_total - runner.steps_before, "no step was computed twice"
    driver.engine.runner = healthy
    assert driver.generate([*tokens(33, 20), 1], 2).cached_tokens == 0, "its blocks were not published"


def test_a_sampler_that_raises_fails_its_own_request_alone(driver: EngineDriver) -> None:
    """A bias on a token that does not exist: nothing the shell lets through, and an IndexError in the sampler."""
    expected = {name: driver.generate(tokens(seed, 40), 12).token_ids for name, seed in MATES.items()}
    for name, seed in MATES.items():
        driver.submit(name, tokens(seed, 40), 12)
    for attempt in range(6):
        driver.submit(f"bad-{attempt}", tokens(40 + attempt, 9), 4,
                      params=SamplingParams(temperature=0.0, logit_bias={10**6: 1.0}))
    driver.run()
    for attempt in range(6):
        bad = driver.results[f"bad-{attempt}", 0]
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert "IndexError" in bad.error
    assert {name: driver.results[name, 0].token_ids for name in MATES} == expected
    assert driver.engine.broken is None


def test_a_grammar_that_breaks_down_fails_its_own_request_alone(driver: EngineDriver) -> None:
    expected = driver.generate(tokens(31, 40), 12).token_ids
    driver.submit("good", tokens(31, 40), 12)
    driver.submit("bad", tokens(34, 40), 12)
    [live] = [live for live in driver.engine._live.values() if live.command.request_id == "bad"]
    live.matcher = BrokenMatcher()  # type: ignore[assignment]
    driver.run()
    assert driver.results["bad", 0].finish_reason == "error"
    assert "grammar" in str(driver.results["bad", 0].error)
    assert driver.results["good", 0].token_ids == expected
    assert driver.stats.blocks_used == 0


# -- out of memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory_in_a_step_is_tried_again_smaller_and_costs_nobody_a_token(driver: EngineDriver,
                                                                                 error: Exception) -> None:
    prompts = {f"r{seed}": tokens(seed, 90) for seed in range(50, 56)}
    expected = {name: driver.generate(prompt, 20).token_ids for name, prompt in prompts.items()}
    driver.engine.apply(ResetCache())
    driver.engine.runner = runner = SmallMemoryRunner(driver.engine.runner, max_tokens=40, error=error)
    for name, prompt in prompts.items():
        driver.submit(name, prompt, 20)
    driver.run()
    assert runner.num_refused > 0
    assert {name: driver.results[name, 0].token_ids for name in prompts} == expected
    assert driver.engine.broken is None
    assert driver.stats.shrunk_steps_total == runner.num_refused
    assert driver.stats.blocks_used == 0
    driver.engine.scheduler.check_invariants()


def test_a_request_that_never_fits_into_memory_ends_and_says_so(driver: EngineDriver) -> None:
    healthy = driver.engine.runner
    driver.engine.runner = SmallMemoryRunner(healthy, max_tokens=0, error=MemoryError("none left"))
    driver.submit("r", tokens(60, 200), 4)
    driver.run()
    result = driver.results["r", 0]
    assert result.finish_reason == "error"
    assert "memory" in str(result.error)
    driver.engine.runner = healthy
    assert driver.generate(tokens(60, 200), 4).finish_reason == "length"


def test_one_preempted_for_want_of_memory_may_be_aborted_at_once(driver: EngineDriver) -> None:
    driver.engine.runner = SmallMemoryRunner(driver.engine.runner, max_tokens=40, error=MemoryError())
    for seed in range(70, 74):
        driver.submit(f"r{seed}", tokens(seed, 30), 4)
    driver.step()
    assert driver.engine.scheduler.num_waiting > 0
    for seed in range(71, 74):
        driver.abort(f"r{seed}")
    driver.run()
    assert driver.results["r70", 0].finish_reason == "length"
    driver.engine.scheduler.check_invariants()


def test_the_same_request_twice_at_once_is_refused(driver: EngineDriver) -> None:
    driver.submit("r", tokens(26, 10), 4)
    driver.engine.submit(SubmitSequence("r", 0, [1, 2], GREEDY, 4, frozenset()))
    refused = driver.step().outputs[0]
    assert (refused.request_id, refused.finish_reason) == ("r", "error")
