"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1) over KV blocks that hold latents.

One latent and one rotated key a position are stored, not the heads they expand to. transformers' modules compute and
norm them and would then expand; here they are handed on as they are, one KV head whose value is the front of its key,
and the expansion is absorbed instead: into the queries before attention, into the outputs after it.
The same numbers as expanding first, up to rounding. Owns no state.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_latents(model: Any) -> int:
    """Stop the model's attention modules from expanding their latents; how many there were."""
    modules = [module for module in model.modules() if is_latent(module)]
    for module in modules:
        module.expand_kv = _unexpanded
    return len(modules)


def is_latent(module: Any) -> bool:
    """Whether this is an attention module that caches latents and expands them in a step of its own."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_lora_rank") and hasattr(module, "kv_b_proj")


def into_latent_space(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries [heads, rows, nope + rope] as [heads, rows, latent + rope], to be multiplied with stored keys."""
    plain_dim = module.qk_nope_head_dim
    absorbed = torch.bmm(query[..., :plain_dim], _expansion(module)[:, :plain_dim])
    return torch.cat((absorbed, query[..., plain_dim:]), dim=-1)


def out_of_latent_space(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Weighted latents [rows, heads, latent] as outputs [rows, heads, value_dim]."""
    values = _expansion(module)[:, module.qk_nope_head_dim:]
    return torch.bmm(out.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def _unexpanded(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 1, rows, latent] and [1, 1, rows, rope] as one key head, and the value that is its front."""
    return torch.cat((latents, rotated), dim=-1), latents


def _expansion(module: Any) -> torch.Tensor:
    """The expanding weight by head [heads, nope + value_dim, latent]."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)
