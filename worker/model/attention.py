"""The door between transformers' models and our paged attention.

transformers calls the function registered here once per layer; everything it needs to know about the step comes in
through a keyword argument that the model's forward passes along, so there is no global state. transformers builds no
mask for an attention it does not know (masking_utils, `_preprocess_mask_arguments`): causality and windows are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from worker.model.latent_attention import into_latent_space, is_latent, out_of_latent_space
from worker.model.model_error import ModelError

ATTENTION_NAME = "headstart_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's turn. `query` is [heads, rows, key_dim], `key` [kv_heads, rows, key_dim], `value` likewise.

    Rows are those of the whole batch, packed end to end, rope already applied. `window` is how many positions a row
    sees, itself included (None: all); `softcap` bounds the scores by cap * tanh(score / cap). `value_in_key`: each
    value is the front of its key (latent attention), and needs no room of its own.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    value_in_key: bool = False


class AttentionPass(Protocol):
    """What one forward pass does in every layer: store the new K/V, then attend."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The rows' outputs [rows, heads, value_dim]."""
        ...


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers. Harmless when done twice."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     *_mask: None, **given: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: tensors [1, heads, rows, dim] in, [1, rows, heads, dim] out."""
    attention_pass: AttentionPass | None = given.get("attention_pass")
    if attention_pass is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention; "
                         "this model family is not supported")
    if given.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which are not supported yet")
    scaling = given.get("scaling")
    window = given.get("sliding_window")
    latent = is_latent(module)
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=into_latent_space(module, query[0]) if latent else query[0], key=key[0], value=value[0],
        scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=int(window) if window else None,
        softcap=given.get("softcap"), value_in_key=latent)
    out = attention_pass.attend(call)
    return (out_of_latent_space(module, out) if latent else out).unsqueeze(0), None
