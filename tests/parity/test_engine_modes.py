"""The oracles on a real model: without any K/V, with K/V of the running sequence only, and with prefix sharing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_engine import EngineDriver
from worker.engine.engine_config import EngineConfig
from worker.model.loader import resolve_model
from worker.prompt.sampling_params import SamplingParams
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle

PROMPT_FILE = Path(__file__).parent.parent / "support" / "prompts" / "code_review_agent.md"
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200
# Greedy, but a small model left to itself soon repeats one line for ever.
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.2, ignore_eos=True)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_gives_the_same_text_in_every_cache_mode() -> None:
    """`off` computes 119,900 positions: minutes. The same on a tiny model is in tests/unit/test_engine.py."""
    tokenizer = PromptTokenizer(TokenizerBundle.from_directory(resolve_model("smollm2").path))
    prompt = tokenizer.encode(PROMPT_FILE.read_text(), add_special_tokens=True)[:PROMPT_TOKENS]
    texts, positions = {}, {}
    for mode in ("full", "decode", "off"):
        driver = EngineDriver(EngineConfig(model="smollm2", exactness="strict", device="cpu", kv_memory="256MiB",
                                           kv_cache=mode))
        driver.submit("one", prompt, OUTPUT_TOKENS, params=GREEDY)
        driver.run()
        texts[mode] = driver.results["one", 0].token_ids
        positions[mode] = driver.stats.computed_positions_total
        assert len(set(texts[mode])) > 50, "a text that repeats itself proves little"
    assert len(texts["full"]) == OUTPUT_TOKENS
    assert texts["off"] == texts["decode"] == texts["full"]
    assert positions == {"off": 119_900, "decode": 699, "full": 699}
