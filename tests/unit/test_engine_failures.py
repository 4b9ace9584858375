"""What becomes of a step that raises: the culprit ends, its batch-mates go on, a broken engine says so."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.tiny_engine import GREEDY, EngineDriver, tokens
from worker.core.batch import StepPlan
from worker.engine.engine import FAILED_STEPS_MAX
from worker.engine.messages import SubmitSequence
from worker.engine.model_runner import RunOutcome
from worker.engine.step_execution import Runner
from worker.model.sampler import SamplerRow
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


def test_steps_that_fail_in_a_row_break_the_engine(driver: EngineDriver) -> None:
    driver.engine.runner = PoisonedRunner(driver.engine.runner, poison=1)
    for attempt in range(FAILED_STEPS_MAX):
        assert driver.engine.broken is None
        driver.submit(f"bad-{attempt}", [1, 2, 3], 4)
        driver.step()
        assert driver.results[f"bad-{attempt}", 0].finish_reason == "error"
    assert driver.engine.broken is not None
    assert "poisoned" in driver.engine.broken


def test_a_good_step_in_between_keeps_the_engine(driver: EngineDriver) -> None:
    driver.engine.runner = PoisonedRunner(driver.engine.runner, poison=1)
    for attempt in range(2 * FAILED_STEPS_MAX):
        driver.submit(f"bad-{attempt}", [1, 2, 3], 4)
        driver.step()
        driver.generate([5, 6, 7], 2)
    assert driver.engine.broken is None


def test_the_same_request_twice_at_once_is_refused(driver: EngineDriver) -> None:
    driver.submit("r", tokens(26, 10), 4)
    driver.engine.submit(SubmitSequence("r", 0, [1, 2], GREEDY, 4, frozenset()))
    refused = driver.step().outputs[0]
    assert (refused.request_id, refused.finish_reason) == ("r", "error")
