"""Where keys and values live: per layer two tensors [block, slot, kv_head, dim]."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVStorage:
    """`keys[layer]` is [num_blocks, block_size, num_kv_heads, key_dim], `values[layer]` alike with value_dim."""

    block_size: int
    num_blocks: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
