"""LoRA adapters made on the spot in PEFT's format, and the same merged into a model by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model: Path, *, seed: int, rank: int = 4, alpha: float = 8, strength: float = 0.3,
                  target_modules: Sequence[str] = ALL_LINEAR, **options: Any) -> Path:
    """An adapter of random weights for `model`'s layers that are named so."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if isinstance(module, torch.nn.Linear) and path.rsplit(".", 1)[-1] in target_modules:
            for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{path}.lora_{half}.weight"] = torch.randn(
                    shape, generator=generator) * strength
    assert tensors, "no layer is named so"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
              "target_modules": list(target_modules), "lora_dropout": 0.1, "inference_mode": True, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with W + B A * scaling in place of every adapted W."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = base.get_submodule(path).weight
            weight.data += (tensors[name.replace("lora_A", "lora_B")] @ down * scaling).to(dtype)
    return base
