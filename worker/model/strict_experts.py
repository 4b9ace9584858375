"""A mixture of experts whose bits depend on each row alone: what strict mode runs in place of transformers' own.

Each expert computes the rows that chose it, padded to a multiple for which a row's bits do not depend on their number
(strict_attention says why), and every row's outputs are added in the order of the experts. A product of one column,
as gates of shared experts are, goes another way in BLAS for each number of rows, so it is made wider. Slow; owns no
state.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from worker.model.model_error import ModelError
from worker.model.strict_attention import ROW_MULTIPLE

STRICT_EXPERTS_NAME = "headstart_strict"
COLUMNS_MIN = 16


def use_strict_experts(model: Any) -> None:
    """Run every mixture in `model` here. ModelError when one is of a kind that cannot be."""
    mixtures = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    for module in mixtures:
        if module.is_transposed or module.has_bias or module.has_post_expert_norm or not module.has_gate:
            raise ModelError(f"{type(module).__name__} has experts that --exactness strict cannot run yet; "
                             "use --exactness fast")
    if mixtures:
        ALL_EXPERTS_FUNCTIONS.register(STRICT_EXPERTS_NAME, _experts)
        model.config._experts_implementation = STRICT_EXPERTS_NAME
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features < COLUMNS_MIN:
            module.forward = partial(_widened, module)  # type: ignore[method-assign]


def _widened(module: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """The linear layer with columns of zeros added for the product."""
    missing = COLUMNS_MIN - module.out_features
    out = linear(rows, pad(module.weight, (0, 0, 0, missing)))[..., :module.out_features]
    return out if module.bias is None else out + module.bias


def _experts(module: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`rows` [n, hidden], each through its `chosen` [n, k] experts, summed with `weights` [n, k]."""
    out = torch.zeros_like(rows)
    for expert in sorted(set(chosen.flatten().tolist())):
        row_ids, ranks = torch.where(chosen == expert)
        inner = pad(rows[row_ids], (0, 0, 0, -len(row_ids) % ROW_MULTIPLE))
        inner = module._apply_gate(linear(inner, module.gate_up_proj[expert]))
        computed = linear(inner, module.down_proj[expert])[:len(row_ids)]
        out[row_ids] += computed * weights[row_ids, ranks].unsqueeze(-1)
    return out
