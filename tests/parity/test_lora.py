"""LoRA adapters equal the model with their weights merged in, mixed in one batch, cold and warm; and what one adapter
computed is never found by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.paged_runs import PagedRun
from tests.support.tiny_engine import EngineDriver, config_for, tokens, write_tiny_llama
from tests.support.tiny_lora import ALL_LINEAR, merged, write_adapter
from tests.support.tiny_models import tiny_model_folder
from worker.model.forward_batch import SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.model.lora_folder import read_adapter
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind

NUM_TOKENS = 12
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {"a": write_adapter(folder / "a", model, seed=1),
            "b": write_adapter(folder / "b", model, seed=2, rank=2, alpha=3, use_rslora=True,
                               target_modules=("q_proj", "up_proj", "o_proj"))}


@torch.inference_mode()
def continued(reference: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NUM_TOKENS):
        ids = torch.cat((ids, reference(ids).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return [int(token) for token in ids[0, len(prompt):]]


@torch.inference_mode()
def logits_of(reference: Any, prompt: list[int]) -> torch.Tensor:
    return reference(torch.tensor([prompt])).logits[0, -1]


def driver_of(model: Path, adapters: dict[str, Path], exactness: str) -> EngineDriver:
    return EngineDriver(config_for(model, exactness=exactness,
                                   lora=tuple(f"{name}={path}" for name, path in adapters.items())))


def key_of(driver: EngineDriver, name: str | None) -> tuple[ExtraKey, ...]:
    return () if name is None else (ExtraKey(ExtraKeyKind.LORA, dict(driver.ready.adapters)[name]),)


def test_each_equals_its_merged_model_in_a_mixed_batch_cold_and_warm(model: Path, adapters: dict[str, Path]) -> None:
    driver = driver_of(model, adapters, "strict")
    references = {None: AutoModelForCausalLM.from_pretrained(model).eval(),
                  **{name: merged(model, path) for name, path in adapters.items()}}
    prompt = tokens(5, 3 * BLOCK + 5)
    expected = {name: continued(reference, prompt) for name, reference in references.items()}
    assert len({tuple(ids) for ids in expected.values()}) == 3, "adapters that change nothing prove nothing"
    for turn in ("cold", "warm"):
        for name in references:
            driver.submit(f"{turn}-{name}", prompt, NUM_TOKENS, extra_keys=key_of(driver, name))
        driver.run()
        for name, ids in expected.items():
            result = driver.results[f"{turn}-{name}", 0]
            assert result.error is None
            assert result.token_ids == ids, (turn, name)
            assert result.cached_tokens == (3 * BLOCK if turn == "warm" else 0)
    driver.engine.scheduler.check_invariants()


def test_the_same_name_with_other_weights_finds_nothing(model: Path, tmp_path: Path) -> None:
    """Two lives of an adapter on one pool: its name is the same, its content is not."""
    prompt = tokens(6, 4 * BLOCK)
    write_adapter(tmp_path / "a", model, seed=1)
    first = read_adapter("a", tmp_path / "a")
    write_adapter(tmp_path / "a", model, seed=1, strength=0.31)
    second = read_adapter("a", tmp_path / "a")
    write_adapter(tmp_path / "a", model, seed=1, alpha=9)
    scaled = read_adapter("a", tmp_path / "a")
    assert len({first.digest, second.digest, scaled.digest}) == 3
    write_adapter(tmp_path / "b", model, seed=1)
    assert read_adapter("other-name", tmp_path / "b").digest == first.digest, "the name is no part of the content"
    write_adapter(tmp_path / "a2", model, seed=1, strength=0.31)
    driver = driver_of(model, {"old": tmp_path / "b", "new": tmp_path / "a2"}, "strict")
    hits = []
    for number, name in enumerate(("old", "new", "old", None)):
        driver.submit(f"r{number}", prompt, 1, extra_keys=key_of(driver, name))
        driver.run()
        hits.append(driver.results[f"r{number}", 0].cached_tokens)
    assert hits == [0, 0, len(prompt) - 1, 0]


@pytest.mark.parametrize("cuts", [[70], [1] * 6 + [64], [33, 37], [16, 16, 38]])
def test_strict_rows_do_not_depend_on_cuts_or_company(model: Path, adapters: dict[str, Path],
                                                      cuts: list[int]) -> None:
    loaded = [read_adapter(name, path) for name, path in adapters.items()]
    paged = load_model(resolve_model(str(model)), exactness="strict", device="cpu", adapters=loaded)
    run = PagedRun(paged)
    prompt = tokens(7, 70)
    digest = loaded[0].digest

    def rows(start: int, length: int, table: list[int], ids: list[int], adapter: bytes | None) -> SequenceRows:
        return SequenceRows(ids[start:start + length], start, table, start, True, adapter)

    whole = run.step(rows(0, 70, run.new_table(70), prompt, digest))[-1]
    table, start, last = run.new_table(70), 0, whole
    for length in cuts:
        others = [rows(0, 9, run.new_table(9), tokens(8, 9), None),
                  rows(0, 21, run.new_table(21), tokens(9, 21), loaded[1].digest)]
        last = run.step(others[0], rows(start, length, table, prompt, digest), others[1])[1]
        start += length
    assert torch.equal(last, whole)


FAMILIES = {"llama": ALL_LINEAR, "gemma3": ("k_proj", "v_proj", "gate_proj"), "qwen3": ("q_proj", "down_proj"),
            "phi3": ("qkv_proj", "gate_up_proj", "down_proj"), "mixtral": ("q_proj", "o_proj")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_mode_in_every_way_that_it_runs(family: str, dtype: str, tmp_path: Path) -> None:
    """Compact layers and transformers' own (Mixtral); rows with an adapter, with none and with another."""
    folder = tiny_model_folder(family)
    paths = [write_adapter(tmp_path / str(seed), folder, seed=seed, target_modules=names)
             for seed, names in enumerate([FAMILIES[family], FAMILIES[family][:1]])]
    loaded = [read_adapter(path.name, path) for path in paths]
    paged = load_model(resolve_model(str(folder)), exactness="fast", dtype=dtype, device="cpu", adapters=loaded)
    run = PagedRun(paged)
    references = [(None, AutoModelForCausalLM.from_pretrained(folder).eval()),
                  *((adapter.digest, merged(folder, path)) for adapter, path in zip(loaded, paths, strict=True))]
    prompts = [tokens(20 + number, 30 + number) for number in range(4)]
    chosen = [references[number] for number in (1, 0, 2, 1)]
    whose = list(zip(prompts, chosen, strict=True))
    expected = torch.stack([logits_of(reference, prompt) for prompt, (_, reference) in whose])
    given = [SequenceRows(prompt, 0, run.new_table(len(prompt)), 0, True, digest) for prompt, (digest, _) in whose]
    found = run.step(*given)
    alone = torch.cat([run.step(rows) for rows in given])
    for logits in (found, alone):
        error = float((logits - expected).std() / expected.std())
        assert error < (1e-4 if dtype == "float32" else 0.1), error
    plain = torch.stack([logits_of(references[0][1], prompt) for prompt in prompts])
    changed = (plain - expected).std(dim=-1) / expected.std()
    assert [float(share) > 0.2 for share in changed] == [True, False, True, True], "the adapters matter"
