"""Learns each attention layer's shape by watching it run once, which no config describes for every family.

A one-token forward pass that attends nothing: it records what every layer hands to attention. Layers that never call
attention (Mamba, linear attention), bidirectional ones, and windows that only a mask would have enforced are refused
here, whatever the family calls them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from worker.model.attention import AttentionCall
from worker.model.model_error import ModelError
from worker.model.model_spec import LayerGeometry


@dataclass(slots=True)
class LayerSurvey:
    """An AttentionPass that only takes notes."""

    seen: dict[int, LayerGeometry] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.seen:
            raise ModelError(f"layer {call.layer} attends twice in one pass; this model family is not supported")
        num_heads, num_rows, _ = call.query.shape
        num_kv_heads, _, key_dim = call.key.shape
        self.seen[call.layer] = LayerGeometry(num_kv_heads, key_dim, call.value.shape[-1], call.window,
                                              call.value_in_key)
        return call.query.new_zeros(num_rows, num_heads, call.value.shape[-1])


def survey_layers(model: Any, *, device: torch.device) -> tuple[LayerGeometry, ...]:
    """Every layer's geometry, in order. ModelError when a layer is of a kind we cannot page."""
    survey = LayerSurvey()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        model.base_model(input_ids=zero, position_ids=zero, use_cache=False, attention_pass=survey)
    num_layers = model.config.num_hidden_layers
    missing = sorted(set(range(num_layers)) - set(survey.seen))
    if missing or len(survey.seen) != num_layers:
        raise ModelError(f"{type(model).__name__}: layers {missing or sorted(survey.seen)} do not use plain "
                         "attention; only models that are attention throughout are supported")
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * num_layers
    for layer, kind in enumerate(kinds):
        window = survey.seen[layer].window
        agrees = window is not None if kind == "sliding_attention" else kind == "full_attention"
        if not agrees:
            raise ModelError(f"{type(model).__name__}: layer {layer} is {kind!r} in a way that is not supported yet")
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise ModelError(f"{type(model).__name__} attends in both directions; only causal models can be served")
    return tuple(survey.seen[layer] for layer in range(num_layers))
