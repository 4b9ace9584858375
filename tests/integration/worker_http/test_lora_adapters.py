"""Adapters as a user has them: `--lora name=DIR`, asked for as `model`, at a worker and through a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway_in_process import GatewayUnderTest, running_gateway
from tests.support.tiny_engine import EngineDriver, config_for
from tests.support.tiny_lora import write_adapter
from tests.support.tiny_worker import WORKER_TOKEN, running_tiny_worker
from worker.engine.engine_config import EngineSetupError

PROMPT = "the quick brown fox jumps over the lazy dog and the cat sat on the mat " * 3


def adapters(model: Path, folder: Path, sql_seed: int) -> list[str]:
    """Two adapters, as arguments: `sql` of this seed, and `law`."""
    made = {name: write_adapter(folder / name, model, seed=seed) for name, seed in (("sql", sql_seed), ("law", 2))}
    return ["--exactness", "strict", *(part for name, path in made.items() for part in ("--lora", f"{name}={path}"))]


async def ask(gateway: GatewayUnderTest, model: str, **fields: Any) -> tuple[str, int, int, str]:
    """Text, cached tokens, the gateway's prediction, and who the answer says it is from."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        raw = await client.completions.with_raw_response.create(model=model, prompt=PROMPT, max_tokens=8, **fields,
                                                                temperature=0, extra_body={"ignore_eos": True})
        answer = raw.parse()
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    return (answer.choices[0].text, details.cached_tokens or 0, int(raw.headers["x-headstart-matched-tokens"]),
            answer.model)


async def test_adapters_share_a_worker_and_no_blocks_whatever_they_are_called(tiny_model: Path,
                                                                              tmp_path: Path) -> None:
    """Two workers whose `sql` differs, as after a reload: the name means the first one's until that is gone."""
    old, new = (adapters(tiny_model, tmp_path / name, seed) for name, seed in (("old", 1), ("new", 9)))
    with running_tiny_worker(tiny_model, *old) as first, running_tiny_worker(tiny_model, *new) as second:
        async with running_gateway(first.url, second.url, worker_token=WORKER_TOKEN) as gateway:
            await gateway.until_exact(num_workers=2)
            names = await _models(gateway)
            assert names == ["tiny", "sql", "law"]
            cold = {name: await ask(gateway, name) for name in names}
            assert len({text for text, *_ in cold.values()}) == 3
            assert {name: model for name, (_, _, _, model) in cold.items()} == {name: name for name in names}
            assert [(hit, predicted) for _, hit, predicted, _ in cold.values()] == [(0, 0)] * 3
            for name in names:
                text, hit, predicted, _ = await ask(gateway, name)
                assert text == cold[name][0]
                assert hit == predicted > 0, "the gateway hashes with the worker's digest"
            await _refuses_others(gateway)
            first.stop()
            await gateway.until(lambda: _is_away(gateway), "the first worker away")
            text, hit, predicted, _ = await ask(gateway, "sql")
            assert text != cold["sql"][0]
            assert (hit, predicted) == (0, 0)
            assert (await ask(gateway, "law"))[0] == cold["law"][0]


async def _models(gateway: GatewayUnderTest) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        return [model.id async for model in client.models.list()]


async def _refuses_others(gateway: GatewayUnderTest) -> None:
    answer = await gateway.send("POST", "/v1/completions", payload={"model": "art", "prompt": "x"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "sql" in answer.error["message"]


async def _is_away(gateway: GatewayUnderTest) -> bool:
    return bool((await gateway.worker(0))["state"] == "unready")


def test_a_wrong_adapter_is_the_operators_to_mend(tiny_model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", tiny_model, seed=1, use_dora=True)
    for lora, word in ((f"x={tmp_path / 'x'}", "use_dora"), (f"{tiny_model}={tmp_path}", "should look like"),
                       (f"{tiny_model.name}={tmp_path}", "taken")):
        with pytest.raises(EngineSetupError, match=word):
            EngineDriver(config_for(tiny_model, lora=(lora,)))
