"""Packed weights rounded to 8 bits, in place, and a copy of them in 8 bits.

Each output's weights become whole numbers from -127 to 127 times a scale of the output's own. What lies as panels of
bf16 (linear.panels_address) is rounded where it lies, so that torch's products and ours read the same model. The copy
is panels of codes, a sign and seven bits of size each, with the scales of a panel's 64 outputs behind them.
"""

from __future__ import annotations

import ctypes

import torch

from worker.model.linear import PANEL_OUTPUTS

LARGEST = 127
_PANELS_AT_ONCE = 64    # bounds the memory that packing takes


def round_and_pack(address: int, num_panels: int, num_in: int) -> torch.Tensor:
    """uint8 [panels, bytes of codes and scales], of the panels of bf16 at `address`, which then are rounded."""
    num_codes, bf16_bytes = num_in * PANEL_OUTPUTS, 2 * num_in * PANEL_OUTPUTS
    packed = torch.empty(num_panels, num_codes + 4 * PANEL_OUTPUTS, dtype=torch.uint8)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        part = packed[first:first + _PANELS_AT_ONCE]
        memory = (ctypes.c_char * (len(part) * bf16_bytes)).from_address(address + first * bf16_bytes)
        panels = torch.frombuffer(memory, dtype=torch.bfloat16).view(len(part), num_in // 2, PANEL_OUTPUTS, 2)
        codes, scales = _codes_and_scales(panels.float())
        panels.copy_(codes * scales)
        part[:, :num_codes] = _in_order(codes)
        part[:, num_codes:] = scales.flatten(1).view(torch.uint8)
    return packed


def _codes_and_scales(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [panels, pairs, outputs, 2] and scales [panels, 1, outputs, 1], both float32."""
    scales = panels.abs().amax((1, 3), keepdim=True) / LARGEST
    return (panels / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_(), scales


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """[panels, codes], in the order in which registers are put together: of two registers of 32 numbers each quarter
    side by side."""
    signed = codes.abs().to(torch.uint8) | (codes < 0).to(torch.uint8) << 7
    quarters = signed.view(*codes.shape[:2], 2, 2, 4, 8)    # [..., half, register, quarter, number]
    in_order: torch.Tensor = quarters.transpose(3, 4).flatten(1)
    return in_order
