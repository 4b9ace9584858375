"""A tiny seeded GGUF file per architecture, written with the gguf package: what llama.cpp's converter would make."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import tiny_model_folder
from tests.support.tiny_tokenizer import CHAT_TEMPLATE

# gguf's converter name for each of our tiny families.
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
                 "gemma3": gguf.MODEL_ARCH.GEMMA3}


def write_tiny_gguf(path: Path, family: str, *, quantisation: gguf.GGMLQuantizationType | None = None) -> None:
    """The tiny model of `family` as GGUF; matrices in `quantisation`, the rest in float32."""
    arch = ARCHITECTURES[family]
    folder = tiny_model_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    if family in ("qwen3", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue    # the file's readers tie it when it is absent
        stem, suffix = name.rsplit(".", 1)
        data = weight.numpy()
        if family == "llama" and stem.rsplit(".", 1)[-1] in heads:
            data = _llama_permuted(data, heads[stem.rsplit(".", 1)[-1]])
        if family == "gemma3" and stem.endswith("norm"):
            data = data + 1    # GGUF holds what the norm multiplies by
        if quantisation is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(data, quantisation),
                              raw_dtype=quantisation)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_permuted(data: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring rows in its rope, transformers the two halves of a head."""
    return data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(data.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    special = {token["content"] for token in saved["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[token in special] for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge)
                             for merge in saved["model"]["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
