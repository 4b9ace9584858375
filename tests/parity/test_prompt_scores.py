"""Log-probabilities of prompts equal transformers', whatever the cache holds, in whatever steps they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_engine import GREEDY, EngineDriver, config_for, tokens, write_tiny_llama
from worker.core.batch import ScoredToken
from worker.engine.messages import StepReport
from worker.prompt.sampling_params import SamplingParams

SCORING = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=3)
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("scored"))


@dataclass
class Scored:
    """A driver, and every prompt's scores by request."""

    driver: EngineDriver
    reference: Any
    scores: dict[str, list[ScoredToken]] = field(default_factory=dict)

    def run(self) -> None:
        while not self.driver.engine.idle:
            self._take(self.driver.step())

    def _take(self, report: StepReport) -> None:
        for output in report.outputs:
            if output.prompt_scores is not None:
                assert output.request_id not in self.scores, "told once"
                self.scores[output.request_id] = output.prompt_scores

    @torch.inference_mode()
    def check(self, request_id: str, prompt: list[int]) -> None:
        expected = torch.log_softmax(self.reference(torch.tensor([prompt])).logits[0].float(), dim=-1)
        found = self.scores[request_id]
        assert len(found) == len(prompt) - 1
        for row, token_id, score in zip(expected, prompt[1:], found, strict=False):
            assert abs(score.logprob - float(row[token_id])) < TOLERANCE
            assert score.rank == int((row > row[token_id]).sum()) + 1
            assert [other for other, _ in score.top] == row.topk(3).indices.tolist()


def scored(model: Path, **changes: object) -> Scored:
    return Scored(EngineDriver(config_for(model, **changes)), AutoModelForCausalLM.from_pretrained(model).eval())


@pytest.mark.parametrize("max_batch_tokens", [512, 32])
def test_right_on_a_warm_cache_and_beside_others(model: Path, max_batch_tokens: int) -> None:
    run = scored(model, max_batch_tokens=max_batch_tokens)
    prompt = tokens(31, 300)
    run.driver.submit("warms", prompt, 2)
    run.run()
    run.driver.submit("plain", prompt, 6)
    run.driver.submit("scored", prompt, 6, params=SCORING)
    run.driver.submit("twin", prompt, 6, params=SCORING)
    run.driver.submit("other", tokens(32, 45), 6)
    run.run()
    results = run.driver.results
    for name in ("scored", "twin"):
        run.check(name, prompt)
        assert results[name, 0].cached_tokens == 0
        assert results[name, 0].token_ids == results["plain", 0].token_ids
    assert set(run.scores) == {"scored", "twin"}, "nobody else pays"
    assert results["plain", 0].cached_tokens == 288
    run.driver.engine.scheduler.check_invariants()


def test_it_leaves_no_cached_block(model: Path) -> None:
    run = scored(model)
    run.driver.submit("scored", tokens(33, 100), 1, params=SCORING)
    run.run()
    assert run.driver.events == []
    assert run.driver.generate(tokens(33, 100), 1).cached_tokens == 0


def test_a_preempted_prompt_is_scored_again_and_told_once(model: Path) -> None:
    run = scored(model, kv_memory="120KiB", max_batch_tokens=64)
    prompt = tokens(34, 90)
    run.driver.submit("first", tokens(35, 100), 60, params=GREEDY)
    run.driver.submit("scored", prompt, 60, params=SCORING)
    run.run()
    assert run.driver.preemptions, "the pool is too large to prove anything"
    assert run.driver.results["scored", 0].error is None
    run.check("scored", prompt)


def test_one_token_has_no_score(model: Path) -> None:
    run = scored(model)
    run.driver.submit("one", [5], 2, params=SCORING)
    run.run()
    assert run.scores["one"] == []
