"""Weights in 8 bits: rounding and products against float64, whole steps against the rounded model in float32."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.test_compiled_decoder import COMPILED, decoding, folder_of, rms
from tests.support.paged_runs import PagedRun
from tests.support.tiny_models import tiny_model_folder, tiny_token_ids
from worker.engine.engine_config import EngineConfig
from worker.engine.startup import hash_scheme
from worker.model import compiled_loading
from worker.model.forward_batch import SequenceRows
from worker.model.linear import PackedLinear, multiplies_bf16
from worker.model.loader import load_model, resolve_model
from worker.model.model_error import ModelError
from worker.model.paged_model import PagedModel
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.block_hash import block_hashes

pytestmark = pytest.mark.skipif(not multiplies_bf16(torch.device("cpu")), reason="this CPU multiplies no bf16")
pytest.importorskip("numba")

from worker.model.compiled import decoder as compiled_decoder  # noqa: E402
from worker.model.compiled.int8_machine import INT8_ROWS_MAX, MULTIPLIES_INT8  # noqa: E402
from worker.model.compiled.int8_panels import round_and_pack  # noqa: E402
from worker.model.compiled.kernels import Matrix, Weight, address_of, panel_of, weight_product  # noqa: E402
from worker.model.compiled.machine import PANEL, compiled  # noqa: E402

needs_tables = pytest.mark.skipif(not MULTIPLIES_INT8, reason="this CPU has no AVX512-VBMI")
LENGTH_MAX = 150


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loading, "SMALLEST_WEIGHTS_BYTES", 0)


@compiled
def multiply(x: np.ndarray, weight: Weight, out: np.ndarray) -> None:
    for panel in range(out.shape[1] // PANEL):
        weight_product(Matrix(address_of(x), x.strides[0], x.shape[1]), len(x), panel_of(weight, x.shape[1], panel),
                       Matrix(address_of(out) + panel * 4 * PANEL, out.strides[0], PANEL))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """float64, as the definition says it. What to round is float32: in float64 halves would fall to another side."""
    exact = weight.float()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (exact / scale).round().double() * scale.double(), 0.0)


@needs_tables
@given(rows=st.integers(1, INT8_ROWS_MAX), panels=st.integers(1, 3),
       num_in=st.integers(1, 5).map(lambda count: 32 * count), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_products_are_those_of_rounded_weights(rows: int, panels: int, num_in: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(panels * PANEL, num_in, generator=chance) * torch.rand(panels * PANEL, 1, generator=chance)
    weight[seed % len(weight)] = 0
    weight = weight.bfloat16()
    product = PackedLinear(weight)
    assert product.panels is not None
    packed = round_and_pack(product.panels, panels, num_in)
    x = torch.randn(rows, num_in, generator=chance).bfloat16()
    out = np.zeros((rows, panels * PANEL), dtype=np.float32)
    multiply(x.view(torch.int16).numpy(), Weight(packed.data_ptr(), True), out)
    wanted = rounded(weight)
    expected, size = x.double() @ wanted.T, x.double().abs() @ wanted.abs().T
    assert ((torch.from_numpy(out) - expected).abs() <= 1e-5 * size).all()
    # What torch reads is the same, to what bf16 keeps of it.
    through_torch = product(x).double()
    assert ((through_torch - expected).abs() <= 2**-8 * expected.abs() + 2**-8 * size).all()
    assert torch.equal(round_and_pack(product.panels, panels, num_in), packed), "rounding twice is rounding once"


def int8_model(family: str, **how: Any) -> PagedModel:
    return load_model(resolve_model(str(folder_of(family))), dtype="int8", device="cpu", **how)


def rounded_logits(family: str, salts: int) -> list[torch.Tensor]:
    """float32 [LENGTH_MAX, vocab] of transformers' model with each product's rows rounded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.bfloat16,
                                                              attn_implementation="eager").float()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.data.clone())      # a shared embedding is not rounded
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded(module.weight.data).float()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([tiny_token_ids(LENGTH_MAX, salt=salt)]), use_cache=False).logits[0]
                for salt in range(salts)]


@needs_tables
@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2_window", "phi4", "olmo2"])
def test_a_step_is_the_rounded_models(family: str) -> None:
    """In 8 bits for few rows, in bf16 of the same weights for more; alone or together, rows are the same."""
    lengths = [1, 70, 33, 16, 120, 90, 17, 2, 150]
    run, exact = PagedRun(int8_model(family)), rounded_logits(family, len(lengths))
    plain = PagedRun(load_model(resolve_model(str(folder_of(family))), device="cpu"))
    shares, plain_shares = decoding(run, lengths), decoding(plain, lengths)
    wanted = torch.stack([logits[length - 1] for logits, length in zip(exact, lengths, strict=True)])
    for count in (9, 5, 1):
        found = run.step(*shares[:count])
        assert rms(found - wanted[:count]) <= 0.05 * rms(wanted[:count])
        # Were nothing rounded, this would be the same model as without the option.
        assert rms(found - plain.step(*plain_shares[:count])) > 1e-4 * rms(wanted[:count])
    together = run.step(*shares[:5])
    assert torch.equal(together, torch.cat([run.step(share) for share in shares[:5]]))


@needs_tables
def test_what_it_takes_in_memory_is_told() -> None:
    model, plain = int8_model("qwen3"), load_model(resolve_model(str(folder_of("qwen3"))), device="cpu")
    spec = model.spec
    assert (spec.weight_dtype, spec.dtype, plain.spec.weight_dtype) == ("int8", "bfloat16", "")
    assert 0 < spec.int8_bytes < plain.spec.weights_bytes
    assert spec.weights_bytes == plain.spec.weights_bytes + spec.int8_bytes
    assert spec.weights_read_bytes == spec.int8_bytes
    assert plain.spec.weights_read_bytes == plain.spec.weights_bytes


@needs_tables
def test_hashes_of_an_int8_model_are_its_own() -> None:
    folder = resolve_model(str(folder_of("llama")))
    bundle = TokenizerBundle.from_directory(folder.path, None)
    schemes = [hash_scheme(EngineConfig(weight_dtype=dtype), folder, load_model(folder, dtype=dtype, device="cpu"),
                           bundle) for dtype in ("auto", "int8")]
    assert schemes[0].digest() != schemes[1].digest()
    assert replace(schemes[0], weights=schemes[1].weights) == schemes[1], "they differ in their weights alone"
    hashes = [block_hashes(tiny_token_ids(160), scheme) for scheme in schemes]
    assert not set(hashes[0]) & set(hashes[1])


def refusal(family: str = "llama", **how: Any) -> str:
    folder = tiny_model_folder(family) if family not in COMPILED else folder_of(family)
    with pytest.raises(ModelError) as refused:
        load_model(resolve_model(str(folder)), **{"dtype": "int8", "device": "cpu", **how})
    message = str(refused.value)
    assert "--weight-dtype int8" in message
    assert "\n" not in message
    return message


def test_what_it_does_not_go_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--exactness strict" in refusal(exactness="strict")
    assert "--kv-dtype auto" in refusal(kv_dtype="float32")
    assert "--block-size" in refusal(block_size=8)
    for family in ("mixtral", "deepseek_v3"):
        assert "transformers' modules" in refusal(family)
    with monkeypatch.context() as patch:
        patch.setattr(compiled_loading, "SMALLEST_WEIGHTS_BYTES", 32 * 2**20)
        assert "less than 32 MiB" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr(compiled_decoder, "MULTIPLIES_INT8", False)
        assert "AVX512-VBMI" in refusal()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        assert "numba is not installed" in refusal()


@needs_tables
def test_prompts_and_steps_read_the_same_model() -> None:
    """A position computed as part of a prompt, through torch, and as a step of its own."""
    run, tokens = PagedRun(int8_model("gemma3")), tiny_token_ids(100)
    table = run.new_table(100)
    whole = run.cut(tokens, table, [100])
    [step] = [run.step(SequenceRows(tokens[-1:], 99, table, 100, True))]
    assert rms(whole - step) <= 0.05 * rms(whole)
