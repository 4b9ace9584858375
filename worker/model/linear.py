"""A weight matrix in the layout that multiplies fastest on its device, with what often follows the product.

On a CPU that multiplies bf16, weights are packed once for oneDNN: about twice as fast up to 16 rows, and no slower at
any number of rows tried up to 512, so the plain weights need not be kept. Elsewhere this is torch's own linear.
Never changes a value of the weights. Results equal torch's to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import functional

# transformers' name of an activation: oneDNN's, and its algorithm.
ACTIVATIONS = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh")}
_PACKED_FOR_ROWS = 16
# How oneDNN packs bf16 on AVX-512, as far as we read it ourselves (panels_address).
PANEL_OUTPUTS, PANEL_INPUTS = 64, 32
# oneDNN reads weights a fifth faster for four rows than for one: worth it where there is much to read.
_STREAMED_ROWS, _STREAMED_BYTES = 4, 32 * 2**20


class Linear:
    """`x @ weight.T + bias` for x [rows, in]; `weight` [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The product put through one of ACTIVATIONS."""
        product = self(x)
        if activation == "silu":
            return functional.silu(product, inplace=True)
        return functional.gelu(product, approximate=ACTIVATIONS[activation][1])

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)

    def plus(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        return self(x).add_(addend)


class PackedLinear(Linear):
    """The same by oneDNN, weights packed, what follows done while the product is still in registers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        with _one_thread():     # with many, oneDNN cuts small matrices into narrower panels
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        super().__init__(packed, bias)
        self.bias = bias
        self.shape = tuple(weight.shape)
        self.panels = panels_address(packed, weight)
        self._is_large = weight.nbytes >= _STREAMED_BYTES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_large and len(x) < _STREAMED_ROWS:
            padded = functional.pad(x, (0, 0, 0, _STREAMED_ROWS - len(x)))
            return self._pointwise(padded, "none", "")[:len(x)]
        return self._pointwise(x, "none", "")

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return self._pointwise(x, *ACTIVATIONS[activation])

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self._binary(x, factor, "mul")

    def plus(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        return self._binary(x, addend, "add")

    def _pointwise(self, x: torch.Tensor, kind: str, algorithm: str) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, kind, [], algorithm)
        return product

    def _binary(self, x: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, kind)
        return product


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def panels_address(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Where the packed weight begins, if it lies as panels: 64 outputs side by side, two inputs of each at a time.

    That is oneDNN's to decide, and the same for all of a matrix, so its ends are looked at. None: it lies otherwise.
    """
    num_out, num_in = weight.shape
    mkldnn = torch.ops.mkldnn
    if not hasattr(mkldnn, "data_ptr") or not hasattr(mkldnn, "_nbytes") or num_in % PANEL_INPUTS:
        return None
    num_panels = -(-num_out // PANEL_OUTPUTS)
    address, panel_bytes = int(mkldnn.data_ptr(packed)), PANEL_OUTPUTS * num_in * 2
    if int(mkldnn._nbytes(packed)) != num_panels * panel_bytes:
        return None
    for panel in {0, num_panels - 1}:
        rows = weight[panel * PANEL_OUTPUTS:(panel + 1) * PANEL_OUTPUTS]
        rows = functional.pad(rows, (0, 0, 0, PANEL_OUTPUTS - len(rows)))
        expected = rows.view(PANEL_OUTPUTS, num_in // 2, 2).transpose(0, 1).contiguous().view(torch.uint8).numpy()
        if ctypes.string_at(address + panel * panel_bytes, panel_bytes) != expected.tobytes():
            return None
    return address


def multiplies_bf16(device: torch.device) -> bool:
    """Whether this CPU has instructions for bf16 products; without them bf16 is slower than fp32."""
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def fastest_linear(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Linear:
    """One Linear for several matrices over the same input, their outputs end to end."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(weights)), "either every matrix has a bias or none"
    bias = torch.cat(given) if given else None
    packs = weight.dtype == torch.bfloat16 and multiplies_bf16(weight.device) and torch._C._has_mkldnn
    return PackedLinear(weight, bias) if packs else Linear(weight, bias)
