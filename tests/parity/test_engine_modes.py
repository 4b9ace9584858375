"""The oracles on a real model: without any K/V, with K/V of the running sequence only, and with prefix sharing."""

from __future__ import annotations

import pytest

from tests.support.tiny_engine import EngineDriver
from worker.engine.engine_config import EngineConfig

PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_gives_the_same_text_in_every_cache_mode() -> None:
    """`off` computes 119,900 positions: minutes. The same on a tiny model is in tests/unit/test_engine.py."""
    prompt = [1000 + 37 * position % 20_000 for position in range(PROMPT_TOKENS)]
    texts, positions = {}, {}
    for mode in ("full", "decode", "off"):
        driver = EngineDriver(EngineConfig(model="smollm2", exactness="strict", device="cpu", kv_memory="256MiB",
                                           kv_cache=mode))
        texts[mode] = driver.generate(prompt, OUTPUT_TOKENS).token_ids
        positions[mode] = driver.stats.computed_positions_total
    assert len(texts["full"]) == OUTPUT_TOKENS
    assert texts["off"] == texts["decode"] == texts["full"]
    assert positions == {"off": 119_900, "decode": 699, "full": 699}
