"""A LoRA adapter on disk, in PEFT's format: adapter_config.json and adapter_model.safetensors.

Owns what is read and what is refused: an option that changes what the adapter computes and is not implemented here is
named, never passed over. The digest is of the content alone: the same name over other weights is another adapter.
A tokenizer or chat template beside the weights is not looked at; adapters share their base model's.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker.model.model_error import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
RANK_MAX = 512
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"^(?P<path>.+)\.lora_(?P<half>[AB])\.weight$")
_NAME = re.compile(r"[^\s=,/]{1,128}")
# Options that change the result: the value each must have to be none of ours to implement.
_MUST_BE_OFF = ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
                "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "use_qalora",
                "layer_replication", "megatron_config", "use_bdlora", "arrow_config")
# These start from changed base weights, which the adapter alone does not carry.
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "eva")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one linear layer: x @ down.T @ up.T; the adapter's scaling is in `up`."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """`parts` by the path of the module in transformers' model. Tensors as they are on disk, on the CPU."""

    name: str
    digest: bytes
    parts: Mapping[str, LowRank]


def named_folder(text: str) -> tuple[str, Path]:
    """`--lora NAME=DIR`. Raises ModelError."""
    name, mark, folder = text.partition("=")
    if not mark or not folder or not _NAME.fullmatch(name):
        raise ModelError(f"--lora {text!r} should look like name=DIR, the name without spaces, commas and slashes")
    return name, Path(folder).expanduser()


def read_adapter(name: str, folder: Path) -> LoraAdapter:
    """Raises ModelError, one line with a remedy."""
    config = _read_config(folder)
    _refuse_unsupported(folder, config)
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if not isinstance(rank, int) or not 1 <= rank <= RANK_MAX or not isinstance(alpha, int | float):
        raise ModelError(f"{folder}: r should be 1 to {RANK_MAX} and lora_alpha a number in {CONFIG_FILE}")
    is_rs = bool(config.get("use_rslora"))
    scaling = alpha / math.sqrt(rank) if is_rs else alpha / rank
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS_FILE}; save the adapter as safetensors")
    return LoraAdapter(name, _digest(weights, scaling), _parts(weights, rank, scaling))


def check_fits(adapter: LoraAdapter, module_at: Callable[[str], Any]) -> None:
    """ModelError unless every part belongs to a linear layer of the base model, of its size."""
    for path, part in adapter.parts.items():
        try:
            module = module_at(path)
        except AttributeError:
            module = None
        if type(module) is not torch.nn.Linear or path.endswith(("lm_head", "kv_b_proj")):
            raise ModelError(f"the adapter {adapter.name} changes {path}, which is no linear layer that can be "
                             "adapted here; leave it out of target_modules")
        if (module.out_features, module.in_features) != (part.up.shape[0], part.down.shape[1]):
            raise ModelError(f"the adapter {adapter.name} is for another base model: {path} is "
                             f"{module.in_features} x {module.out_features} here")


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no {CONFIG_FILE}; --lora wants name=DIR, saved by PEFT") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder}: peft_type should be LORA in {CONFIG_FILE}")
    return config


def _refuse_unsupported(folder: Path, config: Mapping[str, Any]) -> None:
    wrong = [name for name in _MUST_BE_OFF if config.get(name)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_STARTS):
        wrong.append("init_lora_weights")
    if wrong:
        raise ModelError(f"{folder}: {wrong[0]} = {json.dumps(config[wrong[0]])[:80]} is not supported; "
                         "train or convert the adapter without it")


def _digest(weights: Path, scaling: float) -> bytes:
    sha = hashlib.sha256(b"headstart/lora\0" + repr(float(scaling)).encode() + b"\0")
    with weights.open("rb") as file:
        while data := file.read(1 << 20):
            sha.update(data)
    return sha.digest()


def _parts(weights: Path, rank: int, scaling: float) -> dict[str, LowRank]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{weights} cannot be read: {error}") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = _TENSOR.match(key.removeprefix(_PREFIX))
        if found is None or tensor.dim() != 2 or tensor.shape[found["half"] == "B"] != rank:
            raise ModelError(f"{weights}: {key}, shape {list(tensor.shape)}, is no part of an adapter of rank {rank}")
        halves.setdefault(found["path"], {})[found["half"]] = tensor
    if alone := [path for path, pair in halves.items() if len(pair) < 2]:
        raise ModelError(f"{weights}: {alone[0]} has only one of lora_A and lora_B")
    if not halves:
        raise ModelError(f"{weights} holds no adapter")
    return {path: LowRank(pair["A"], pair["B"].float() * scaling) for path, pair in halves.items()}
