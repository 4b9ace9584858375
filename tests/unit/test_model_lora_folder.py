"""Reading LoRA adapters: what PEFT writes is read, and what would change the result otherwise is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from worker.model.lora_folder import check_fits, named_folder, read_adapter
from worker.model.model_error import ModelError

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
PAIR = {Q.format("A"): torch.ones(2, 8), Q.format("B"): torch.ones(6, 2)}


def written(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    save_file(PAIR if tensors is None else tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", **config}))
    return folder


@pytest.mark.parametrize(("config", "scaling"), [({}, 2.0), ({"use_rslora": True}, 4 / 2**0.5),
                                                 ({"lora_alpha": 2}, 1.0)])
def test_scaling_is_in_the_second_half(tmp_path: Path, config: dict[str, Any], scaling: float) -> None:
    part = read_adapter("x", written(tmp_path, **config)).parts["model.layers.0.self_attn.q_proj"]
    assert torch.allclose(part.up, torch.full((6, 2), scaling))
    assert torch.equal(part.down, torch.ones(2, 8))


@pytest.mark.parametrize("config", [
    {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"rank_pattern": {"q_proj": 4}},
    {"alpha_pattern": {"q_proj": 4}}, {"fan_in_fan_out": True}, {"lora_bias": True},
    {"target_parameters": ["experts.gate_up_proj"]}, {"init_lora_weights": "pissa_niter_4"},
    {"trainable_token_indices": [1]}])
def test_what_is_not_implemented_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(config))):
        read_adapter("x", written(tmp_path, **config))


@pytest.mark.parametrize(("config", "word"), [({"peft_type": "IA3"}, "peft_type"), ({"r": 0}, "r should be"),
                                              ({"r": "8"}, "r should be"), ({"lora_alpha": None}, "lora_alpha"),
                                              ({"r": 3}, "rank 3")])
def test_what_makes_no_sense_is_refused(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        read_adapter("x", written(tmp_path, **config))


@pytest.mark.parametrize("tensors", [
    {}, {Q.format("A"): torch.ones(2, 8)}, {**PAIR, "base_model.model.lm_head.lora_embedding_A": torch.ones(2, 8)},
    {**PAIR, Q.format("A").replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(6)}])
def test_every_tensor_must_have_a_meaning(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        read_adapter("x", written(tmp_path, tensors))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter("x", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with pytest.raises(ModelError, match="safetensors"):
        read_adapter("x", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter("x", tmp_path)


@pytest.mark.parametrize("text", ["x", "=dir", "x=", "a b=dir", "a/b=dir"])
def test_names(text: str) -> None:
    with pytest.raises(ModelError, match="name=DIR"):
        named_folder(text)
    assert named_folder("x=/a=b") == ("x", Path("/a=b"))


def test_it_must_fit_the_model(tmp_path: Path) -> None:
    adapter = read_adapter("x", written(tmp_path))
    check_fits(adapter, lambda path: torch.nn.Linear(8, 6))
    for module, word in ((torch.nn.Linear(8, 7), "another base"), (torch.nn.Embedding(8, 6), "no linear layer")):
        with pytest.raises(ModelError, match=word):
            check_fits(adapter, lambda path, module=module: module)
