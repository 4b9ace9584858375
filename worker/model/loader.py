"""From the word after `--model` to a model that can run.

Owns the choice of dtype and device, and the refusal of what cannot be served. Never touches a request.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from worker.model.attention import ATTENTION_NAME, register_attention
from worker.model.compact_builder import NotCompact, build_compact
from worker.model.compact_decoder import CompactDecoder
from worker.model.compiled_loading import BLOCK_SIZE, INT8, compile_decoder, compile_prompts
from worker.model.gguf_convert import conversion_path, ensure_converted
from worker.model.kv_storage import KVStorage
from worker.model.latent_attention import keep_latents
from worker.model.layer_survey import survey_layers
from worker.model.linear import multiplies_bf16
from worker.model.lora import LoraLayers, adapt_compact, adapt_modules
from worker.model.lora_folder import LoraAdapter, check_fits
from worker.model.model_error import ModelError
from worker.model.model_folder import ModelFolder, default_cache_dir, file_sha256, open_folder, read_config
from worker.model.model_spec import ModelSpec
from worker.model.packaged import PACKAGED_MODELS
from worker.model.paged_model import PagedModel
from worker.model.strict_attention import KEY_TILE
from worker.model.strict_experts import use_strict_experts

__all__ = ["KVStorage", "ModelError", "ModelFolder", "PagedModel", "load_model", "resolve_model"]

logger = logging.getLogger("headstart.model")

_KV_DTYPES = ("float32", "bfloat16", "float16")
_LATER_KV_DTYPES = ("int8", "fp8", "k8v4", "int4")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Beyond a length their frequencies depend on the longest sequence in the batch, and with them every cached key.
_ROPES_THAT_TURN = ("dynamic", "longrope")


def resolve_model(model: str, *, cache_dir: Path | None = None, chat_template: Path | None = None) -> ModelFolder:
    """Find (or make, once) the folder of `model`: smollm2, gemma3, a folder, a .gguf file, or a hub id.

    Safe in two processes at once. Raises ModelError, one line with a remedy.
    """
    if chat_template is not None and not chat_template.is_file():
        raise ModelError(f"the chat template {chat_template} does not exist; check --chat-template")
    cache = cache_dir or default_cache_dir()
    if packaged := PACKAGED_MODELS.get(model):
        target = conversion_path(cache, packaged.name, packaged.sha256)
        ensure_converted(target, packaged.sha256, packaged.find_gguf)
        return open_folder(target, name=packaged.name, chat_template=chat_template)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_folder(path, chat_template=chat_template)
    if path.is_file():
        return _resolve_gguf(path, cache, chat_template)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelError(f"there is no model {model!r}: it is neither a folder, a .gguf file, a hub id (owner/name), "
                         f"nor one of {', '.join(PACKAGED_MODELS)}")
    return open_folder(_download(model), name=model, chat_template=chat_template)


def load_model(folder: ModelFolder, *, dtype: str = "auto", kv_dtype: str = "auto", device: str = "auto",
               exactness: str = "fast", block_size: int = 16, adapters: Sequence[LoraAdapter] = (),
               cache_dir: Path | None = None) -> PagedModel:
    """Load the weights and wire our paged attention and the adapters in. Raises ModelError, one line.

    `dtype` "int8" computes like "auto", with weights rounded to 8 bits. Compiled code is kept in `cache_dir`.
    """
    if exactness not in ("fast", "strict"):
        raise ModelError(f"--exactness {exactness!r} is unknown; choose fast or strict")
    if exactness == "strict" and KEY_TILE % block_size:
        raise ModelError(f"--exactness strict needs a --block-size that divides {KEY_TILE}, not {block_size}")
    config = read_config(folder.path)
    _refuse_unsupported(config)
    torch_device = _device_of(device)
    is_int8 = dtype == INT8
    torch_dtype = _dtype_of("auto" if is_int8 else dtype, exactness, torch_device)
    stored_as = _kv_dtype_of(kv_dtype, torch_dtype)
    if is_int8:
        _check_int8(exactness, stored_as, torch_device, block_size)
    model = _load_weights(folder, torch_dtype, torch_device)
    if exactness == "strict":
        use_strict_experts(model)
    layers = survey_layers(model, device=torch_device)
    spec = ModelSpec(
        name=folder.name, layers=layers, max_context=_max_context(folder.name, model.config),
        vocab_size=int(model.config.vocab_size), eos_token_ids=_eos_token_ids(model),
        kv_bytes_per_token=sum(layer.elements_per_token() for layer in layers) * stored_as.itemsize,
        dtype=_name_of(torch_dtype), kv_dtype=_name_of(stored_as), device=str(torch_device),
        weights_bytes=sum(parameter.nbytes for parameter in model.parameters()),    # a tied head's counts once
        weight_dtype=INT8 if is_int8 else "")
    for adapter in adapters:
        check_fits(adapter, model.get_submodule)
    layers_path = _layers_path(model)
    compact = None
    if exactness == "fast":
        model, compact = _compact(folder, model)
    few_rows = None if compact is None else compile_decoder(compact, spec, cache_dir or default_cache_dir())
    if is_int8:
        if few_rows is None:
            raise ModelError(f"--weight-dtype int8 is not for {folder.name}: it runs through transformers' "
                             "modules; use --weight-dtype auto")
        spec = replace(spec, weights_bytes=spec.weights_bytes + few_rows.int8_bytes,
                       int8_bytes=few_rows.int8_bytes)
    many_rows = None if compact is None or few_rows is None else compile_prompts(few_rows, compact, spec.layers)
    lora = None
    if adapters:
        lora = LoraLayers(adapters, dtype=torch_dtype, device=torch_device, computes_all_rows=exactness == "strict")
        if compact is None:
            adapt_modules(model, lora)
        else:
            compact = adapt_compact(compact, lora, prefix=layers_path)
    return PagedModel(model, spec, exactness=exactness, block_size=block_size, compact=compact, adapters=lora,
                      few_rows=few_rows, many_rows=many_rows)


def _check_int8(exactness: str, kv_dtype: torch.dtype, device: torch.device, block_size: int) -> None:
    """ModelError where other settings do not go with weights in 8 bits: nothing would read them."""
    if exactness == "strict":
        raise ModelError("--weight-dtype int8 does not go with --exactness strict, which computes in float32; "
                         "use --exactness fast")
    if not multiplies_bf16(device):
        raise ModelError(f"--weight-dtype int8 needs a CPU that multiplies bfloat16, which {device} is not; "
                         "use --weight-dtype auto")
    if kv_dtype != torch.bfloat16:
        raise ModelError(f"--weight-dtype int8 needs K/V in bfloat16, not {_name_of(kv_dtype)}; use --kv-dtype auto")
    if block_size % BLOCK_SIZE:
        raise ModelError(f"--weight-dtype int8 needs a --block-size that is a multiple of {BLOCK_SIZE}, "
                         f"not {block_size}")


def _layers_path(model: Any) -> str:
    """Where a model keeps its layers, as paths of its modules begin."""
    return f"{model.base_model_prefix}.layers"


def _compact(folder: ModelFolder, model: Any) -> tuple[Any, CompactDecoder | None]:
    """The model in few operators where it is of a kind we know; else None, and the model as transformers runs it."""
    dtype, device = model.dtype, model.device
    try:
        return model, build_compact(model, device)
    except NotCompact as reason:
        logger.warning("%s runs through transformers' own modules, slower: %s", folder.name, reason)
        return (_load_weights(folder, dtype, device) if reason.consumed else model), None


def _resolve_gguf(path: Path, cache: Path, chat_template: Path | None) -> ModelFolder:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is a file but not a .gguf file; --model wants the folder that holds config.json")
    digest = file_sha256(path)
    target = conversion_path(cache, path.stem, digest)
    ensure_converted(target, digest, lambda scratch: path)
    return open_folder(target, name=path.stem, chat_template=chat_template)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:   # httpx, requests, OS and hub errors alike: each is "could not be had"
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise ModelError(f"{hub_id} cannot be had from the hub{offline}: {reason or type(error).__name__}; check the "
                         "name and the network, or give --model a folder on this machine") from error


def _refuse_unsupported(config: dict[str, Any]) -> None:
    kind = str(config.get("model_type", "unknown"))
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{kind} is an encoder-decoder model; only decoder-only models can be served")
    if "text_config" in config:
        raise ModelError(f"{kind} is multimodal; use the text-only checkpoint of the family")
    if config.get("num_kv_shared_layers"):
        raise ModelError(f"{kind} shares keys and values between layers, which is not supported yet")
    if config.get("quantization_config"):
        raise ModelError(f"this {kind} checkpoint is quantised; use the unquantised one")


def _load_weights(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    register_attention()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True,
            output_loading_info=True)
        if missing := sorted(report["missing_keys"]):    # transformers would make them up at random
            raise ModelError(f"{folder.path} lacks weights ({missing[0]} and {len(missing) - 1} more); "
                             "download the model again")
        if keep_latents(model) == 0 and getattr(model.config, "kv_lora_rank", None):
            raise ModelError(f"{folder.name} uses multi-head latent attention of a kind that is not supported")
        return model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{folder.name} does not fit on {device}; use a smaller model or --device cpu") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().split("\n", 1)[0][:300]
        raise ModelError(f"{folder.path} cannot be loaded: {reason}") from error


def _max_context(name: str, config: Any) -> int:
    """The longest sequence whose every key depends on what comes before it alone."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):    # one rope, or one per layer type
        if isinstance(part, dict) and part.get("rope_type") in _ROPES_THAT_TURN:
            sound = int(part.get("original_max_position_embeddings") or longest)
            if sound < longest:
                logger.warning("%s is served up to %d positions of %d: beyond them its %s rope gives every key "
                               "another value, so no prefix could be shared", name, sound, longest, part["rope_type"])
                longest = sound
    return longest


def _device_of(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ModelError(f"--device {device!r} is unknown; choose auto, cpu or cuda") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ModelError(f"--device {device!r} is not supported; choose auto, cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda was asked for but torch sees no CUDA device; use --device cpu")
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def _dtype_of(dtype: str, exactness: str, device: torch.device) -> torch.dtype:
    if dtype not in ("auto", *_KV_DTYPES):
        raise ModelError(f"dtype {dtype!r} is unknown; choose auto, int8, {', '.join(_KV_DTYPES)}")
    if exactness == "strict":
        if dtype not in ("auto", "float32"):
            raise ModelError(f"--exactness strict computes in float32, not {dtype}; use --exactness fast")
        return torch.float32
    if dtype != "auto":
        return _named(dtype)
    return torch.bfloat16 if device.type == "cuda" or multiplies_bf16(device) else torch.float32


def _kv_dtype_of(kv_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    if kv_dtype == "auto":
        return model_dtype
    if kv_dtype in _LATER_KV_DTYPES:
        raise ModelError(f"--kv-dtype {kv_dtype} comes in a later release; choose auto, {', '.join(_KV_DTYPES)}")
    if kv_dtype not in _KV_DTYPES:
        raise ModelError(f"--kv-dtype {kv_dtype!r} is unknown; choose auto, {', '.join(_KV_DTYPES)}")
    return _named(kv_dtype)


def _named(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Every id that ends a generation, from generation_config.json, else config.json."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = model.config.eos_token_id
    if ends is None:
        return ()
    return tuple(int(end) for end in ends) if isinstance(ends, (list, tuple)) else (int(ends),)
