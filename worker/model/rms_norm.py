"""Root mean square norms in few operators, which is what counts when a step has few rows.

torch composes rms_norm of eight operators, but has layer norm in one. The mean of (x, -x) is zero and its variance
the mean square of x, so that layer norm of the two, cut in half, is the RMS norm of x. Computed in float32 like it,
and rounded once. Never used where many rows make the doubled work dearer than what the operators cost.
"""

from __future__ import annotations

import torch

# Up to so many elements the doubled row is cheaper.
FEW_ELEMENTS = 16 * 1024


class RmsNorm:
    """Of rows in `dtype`. `weight` [dim], in that or in float32: what the normed row is multiplied by."""

    def __init__(self, weight: torch.Tensor, eps: float | None, dtype: torch.dtype) -> None:
        self.weight = weight
        self.eps = eps
        self._dim = len(weight)
        self._doubled = None if eps is None or weight.is_cuda else torch.stack((weight, weight)).float()
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=dtype, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._doubled is None or x.numel() > FEW_ELEMENTS or self.eps is None:
            return torch.rms_norm(x, (self._dim,), self.weight, self.eps)
        both = torch.layer_norm(x.unsqueeze(-2) * self._signs, (2, self._dim), self._doubled, None, self.eps)
        return both.select(-2, 0)


class WholeNorm:
    """Of heads [rows, heads, dim], over all of a row's heads at once, as OLMo norms queries and keys."""

    def __init__(self, norm: RmsNorm) -> None:
        self.norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(1)).view(x.shape)


def unnormed(x: torch.Tensor) -> torch.Tensor:
    """In place of a norm where a family has none."""
    return x
