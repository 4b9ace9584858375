"""Going on from another engine's outputs: the rest is the same, and the accounts still add up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.tiny_engine import EngineDriver, Finished, config_for, tokens
from worker.engine.messages import SubmitSequence
from worker.prompt.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=1.0, seed=5, ignore_eos=True, presence_penalty=1.0, repetition_penalty=1.2)


def resume(driver: EngineDriver, request_id: str, prompt: list[int], generated: list[int], max_new: int) -> None:
    driver.results[request_id, 2] = Finished()
    driver.engine.submit(SubmitSequence(
        request_id, 2, [*prompt, *generated], PARAMS, max_new, frozenset(), arrived_at=time.monotonic(),
        num_generated=len(generated)))


@pytest.mark.parametrize("length", [5, 16, 33])
def test_the_rest_is_the_same_and_only_the_rest_is_told(tiny_llama: Path, length: int) -> None:
    driver, other = EngineDriver(config_for(tiny_llama)), EngineDriver(config_for(tiny_llama))
    prompt = tokens(1, length)
    driver.submit("whole", prompt, 40, choice=2, params=PARAMS)
    driver.run()
    whole = driver.results["whole", 2].token_ids
    for cut in (1, 15, 16, 17, 39):
        for engine in (driver, other):      # the first one holds all of it, outputs too
            resume(engine, f"cut {cut}", prompt, whole[:cut], 40)
            engine.run()
            result = engine.results[f"cut {cut}", 2]
            assert (result.token_ids, result.finish_reason) == (whole[cut:], "length")
            assert result.cached_tokens is not None
            assert 0 <= result.cached_tokens < length
            stats = result.stats
            assert stats is not None
            assert (stats.prompt_tokens, stats.output_tokens) == (length, 40)
            assert stats.cached_tokens + stats.computed_tokens == length
            engine.engine.scheduler.check_invariants()
    assert driver.stats.hit_tokens_total <= driver.stats.queried_tokens_total


def test_preempted_resumptions_are_the_same(tiny_llama: Path) -> None:
    alone = EngineDriver(config_for(tiny_llama))
    wholes = {}
    for seed in range(3):
        alone.submit(f"r{seed}", tokens(seed, 40), 120, choice=2, params=PARAMS)
        alone.run()
        wholes[seed] = alone.results[f"r{seed}", 2].token_ids
    block_bytes = alone.ready.kv_bytes_per_token * 16
    tight = EngineDriver(config_for(tiny_llama, kv_memory=f"{14 * block_bytes}B"))
    for seed, whole in wholes.items():
        resume(tight, f"r{seed}", tokens(seed, 40), whole[:20], 120)
    tight.run()
    assert tight.preemptions
    assert {seed: tight.results[f"r{seed}", 2].token_ids for seed in wholes} == {
        seed: whole[20:] for seed, whole in wholes.items()}


def test_nothing_left_to_resume_is_refused(driver: EngineDriver) -> None:
    resume(driver, "done", tokens(1, 10), tokens(2, 8), 8)
    resume(driver, "no prompt", [], tokens(2, 8), 80)
    driver.run()
    assert [driver.results[name, 2].finish_reason for name in ("done", "no prompt")] == ["error", "error"]
