"""Embeddings equal the mean of transformers' last hidden states, however a prompt is cut and whatever is cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.paged_runs import PagedRun
from tests.support.tiny_engine import EngineDriver, config_for, tokens, write_tiny_llama
from tests.support.tiny_lora import merged, write_adapter
from tests.support.tiny_models import tiny_model_folder
from worker.model.forward_batch import SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind

POOLING = SamplingParams(temperature=0.0, ignore_eos=True, pools=True)


@torch.inference_mode()
def mean_hidden(reference: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    return reference.base_model(torch.tensor([prompt])).last_hidden_state[0].float().mean(dim=0)


@pytest.mark.parametrize("max_batch_tokens", [512, 48])
def test_by_the_engine_cold_warm_and_cut(tmp_path: Path, max_batch_tokens: int) -> None:
    model = write_tiny_llama(tmp_path / "m")
    adapter = write_adapter(tmp_path / "a", model, seed=4)
    driver = EngineDriver(config_for(model, max_batch_tokens=max_batch_tokens, lora=(f"a={adapter}",)))
    key = (ExtraKey(ExtraKeyKind.LORA, driver.ready.adapters[0][1]),)
    prompt = tokens(41, 130)
    driver.generate(prompt, 1)
    driver.submit("base", prompt, 1, params=POOLING)
    driver.submit("adapted", prompt, 1, params=POOLING, extra_keys=key)
    driver.submit("short", prompt[:1], 1, params=POOLING)
    driver.submit("other", tokens(42, 60), 5)
    driver.run()
    found = {output.request_id: torch.tensor(output.embedding) for report in driver.reports
             for output in report.outputs if output.embedding is not None}
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    for name, expected in (("base", mean_hidden(base, prompt)), ("short", mean_hidden(base, prompt[:1])),
                           ("adapted", mean_hidden(merged(model, adapter), prompt))):
        assert torch.allclose(found.pop(name), expected, atol=1e-4), name
    assert not found
    assert driver.results["base", 0].cached_tokens == 0
    driver.engine.scheduler.check_invariants()


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite", "phi3"])
def test_every_way_that_fast_mode_runs(family: str) -> None:
    folder = tiny_model_folder(family)
    run = PagedRun(load_model(resolve_model(str(folder)), exactness="fast", dtype="float32", device="cpu"))
    prompts = [tokens(50, 20), tokens(51, 33)]
    given = [SequenceRows(prompt, 0, run.new_table(len(prompt)), 0, True, pools=number == 1)
             for number, prompt in enumerate(prompts)]
    pooled: list[torch.Tensor] = []
    logits = run.model.forward(run.batch(*given), run.storage, pooled)
    [summed] = pooled
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.allclose((summed / 33).float(), mean_hidden(reference, prompts[1]), atol=1e-3)
    assert torch.allclose(logits, run.step(*given), atol=1e-4), "logits are what they were"
