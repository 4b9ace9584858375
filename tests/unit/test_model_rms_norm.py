"""RMS norm by way of layer norm: the same as torch's own up to one rounding, for few rows and for many."""

from __future__ import annotations

import pytest
import torch

from worker.model.rms_norm import FEW_ELEMENTS, RmsNorm

DIM = 64


@pytest.mark.filterwarnings("ignore:Mismatch dtype")    # float32 weights, many rows
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize(("dtype", "tolerance"),
                         [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
@pytest.mark.parametrize("shape", [(1, DIM), (3, 5, DIM), (FEW_ELEMENTS // DIM, DIM), (FEW_ELEMENTS // DIM + 1, DIM)])
def test_equals_the_definition(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float,
                               weight_dtype: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 30 + 7).to(dtype)
    x[..., 0, :] *= 1e-3
    weight = torch.randn(DIM, generator=generator).to(weight_dtype or dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    found = RmsNorm(weight, 1e-6, dtype)(x)
    assert found.shape == x.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2 * tolerance, atol=1e-6)


def test_a_row_of_zeros_stays_one() -> None:
    assert not RmsNorm(torch.ones(DIM), 1e-6, torch.bfloat16)(torch.zeros(2, DIM, dtype=torch.bfloat16)).any()
