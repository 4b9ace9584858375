"""Linear layers, packed and plain, and what follows the product: torch's own numbers to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from worker.model.linear import ACTIVATIONS, Linear, PackedLinear, fastest_linear, multiplies_bf16

CPU = torch.device("cpu")
packs = pytest.mark.skipif(not multiplies_bf16(CPU), reason="this CPU has no bf16 products")


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3).to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 16, 130])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [(Linear, torch.float32),
                                             pytest.param(PackedLinear, torch.bfloat16, marks=packs)])
def test_products_and_what_follows(kind: type[Linear], dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    weight, x = noise(40, 24, dtype=dtype), noise(rows, 24, dtype=dtype, seed=1)
    bias = noise(40, dtype=dtype, seed=2) if has_bias else None
    other = noise(rows, 40, dtype=dtype, seed=3)
    made = kind(weight, bias)
    exact = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, **tolerance)

    check(made(x), exact)
    check(made.times(x, other), exact * other.float())
    check(made.plus(x, other), exact + other.float())
    check(made.activated(x, "silu"), functional.silu(exact))
    check(made.activated(x, "gelu"), functional.gelu(exact))
    check(made.activated(x, "gelu_pytorch_tanh"), functional.gelu(exact, approximate="tanh"))
    assert set(ACTIVATIONS) == {"silu", "gelu", "gelu_pytorch_tanh"}
    assert torch.equal(other, noise(rows, 40, dtype=dtype, seed=3)), "an operand was written to"


def test_several_matrices_as_one() -> None:
    weights = [noise(size, 8, dtype=torch.float32, seed=size) for size in (6, 2, 4)]
    x = noise(5, 8, dtype=torch.float32)
    found = fastest_linear(weights, [None, None, None])(x)
    torch.testing.assert_close(found, torch.cat([x @ weight.T for weight in weights], -1))


@packs
def test_bf16_weights_are_packed_and_float32_are_not() -> None:
    assert type(fastest_linear([noise(4, 4, dtype=torch.bfloat16)], [None])) is PackedLinear
    assert type(fastest_linear([noise(4, 4, dtype=torch.float32)], [None])) is Linear
