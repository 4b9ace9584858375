"""Seeded checkpoints of every family, small enough to make in a test: real transformers code, a few thousand weights.

Weights are drawn larger than training would start with, so that logits are far apart and a wrong mask shows.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.tiny_tokenizer import TINY_VOCAB_SIZE, write_tiny_tokenizer

WINDOW = 32
MAX_CONTEXT = 2048

_SHAPE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 24,
              "query_pre_attn_scalar": 24}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "shared_expert_intermediate_size": 48}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
           "qk_rope_head_dim": 8, "v_head_dim": 20, "first_k_dense_replace": 1}

# Family: config class and what it adds to or changes in _SHAPE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**_TWO_KINDS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3TextConfig", _TWO_KINDS),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
                                  "embedding_multiplier": 2.0}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi4": ("Phi3Config", {"partial_rotary_factor": 0.75}),
    "phi4_longrope": ("Phi3Config", {"original_max_position_embeddings": 160, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5] * 4, "long_factor": [4.0, 9.0] * 4,
        "original_max_position_embeddings": 160}}),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", _EXPERTS),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2Config", {**_EXPERTS, **_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, "n_group": 2, "topk_group": 1}),
}


@cache
def tiny_model_folder(family: str) -> Path:
    """A Hugging Face folder with a seeded model of `family` and the tiny tokenizer, made once per process."""
    return write_tiny_model(family, *FAMILIES[family])


def write_tiny_model(name: str, config_class: str, changes: dict[str, Any]) -> Path:
    """A folder like those of FAMILIES; goes when the process ends."""
    config = getattr(transformers, config_class)(**{**_SHAPE, **changes})
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():    # norms and biases start at one and zero, which would hide a mistake in them
        for path, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.sin(torch.arange(weight.numel()) * 1.7 + len(path)))
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Float32 logits [tokens, vocab] of transformers' own plain forward: eager attention, no cache, one sequence."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                              attn_implementation="eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


def tiny_token_ids(count: int, *, salt: int = 0) -> list[int]:
    """A fixed, aperiodic run of ordinary token ids."""
    return [3 + (position * position * 31 + position * 17 + salt * 101) % (TINY_VOCAB_SIZE - 3)
            for position in range(count)]
