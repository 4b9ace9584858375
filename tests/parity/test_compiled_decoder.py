"""Decode steps in compiled code against float32 and against torch's own way, over families, lengths and batches."""

from __future__ import annotations

import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paged_runs import PagedRun
from tests.support.tiny_models import WINDOW, tiny_model_folder, tiny_token_ids, write_tiny_model
from worker.model import compiled_loading
from worker.model.compiled_loading import compile_decoder, place_for_code
from worker.model.forward_batch import SequenceRows
from worker.model.linear import PackedLinear, multiplies_bf16, panels_address
from worker.model.loader import load_model, resolve_model
from worker.model.model_folder import default_cache_dir
from worker.model.paged_model import PagedModel

pytestmark = pytest.mark.skipif(not multiplies_bf16(torch.device("cpu")), reason="this CPU multiplies no bf16")
pytest.importorskip("numba")

_WIDE = {"head_dim": 32}
_TWO_KINDS = {**_WIDE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW,
              "query_pre_attn_scalar": 24}
# Sizes that compiled code takes: multiples of 32, but for vocabularies and outputs, which end within a panel.
COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_gelu": ("LlamaConfig", {"head_dim": 64, "hidden_act": "gelu", "hidden_size": 96, "intermediate_size": 160,
                                   "num_attention_heads": 3, "num_key_value_heads": 3}),
    "qwen2_window": ("Qwen2Config", {**_WIDE, "hidden_size": 128, "use_sliding_window": True,
                                     "sliding_window": WINDOW, "max_window_layers": 1}),
    "phi3": ("Phi3Config", {"hidden_size": 128, "sliding_window": WINDOW}),
    "phi4": ("Phi3Config", {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1,
                            "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "olmo2": ("Olmo2Config", {**_WIDE, "hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5}),
    "olmo2_grouped": ("Olmo2Config", {**_WIDE, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {**_TWO_KINDS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3TextConfig", {**_TWO_KINDS, "num_key_value_heads": 1}),
    "granite": ("GraniteConfig", {"hidden_size": 128, "logits_scaling": 3.0, "attention_multiplier": 0.2,
                                  "residual_multiplier": 0.7, "embedding_multiplier": 2.0}),
    "smollm3": ("SmolLM3Config", {**_WIDE, "hidden_size": 128, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
}
LENGTH_MAX = 150


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loading, "SMALLEST_WEIGHTS_BYTES", 0)


@cache
def compiled_model(family: str, block_size: int = 16, threads: int = 1) -> PagedModel:
    before, torch_threads = compiled_loading.SMALLEST_WEIGHTS_BYTES, torch.get_num_threads()
    compiled_loading.SMALLEST_WEIGHTS_BYTES = 0
    torch.set_num_threads(threads)
    try:
        model = load_model(resolve_model(str(folder_of(family))), device="cpu", block_size=block_size)
    finally:
        torch.set_num_threads(torch_threads)
        compiled_loading.SMALLEST_WEIGHTS_BYTES = before
    assert model._few_rows is not None, f"{family} is not compiled"
    return model


@cache
def folder_of(family: str) -> Any:
    return write_tiny_model(f"compiled-{family}", *COMPILED[family])


@cache
def exact_logits(family: str, salt: int) -> torch.Tensor:
    """float32 [LENGTH_MAX, vocab] of the very weights that bf16 leaves."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.bfloat16,
                                                              attn_implementation="eager").float()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tiny_token_ids(LENGTH_MAX, salt=salt)]), use_cache=False).logits[0]


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def decoding(run: PagedRun, lengths: list[int]) -> list[SequenceRows]:
    """Sequences of these lengths whose last token alone is to be computed. Their prompts go through torch."""
    shares = []
    for salt, length in enumerate(lengths):
        tokens = tiny_token_ids(LENGTH_MAX, salt=salt)[:length]
        table = run.new_table(length)
        if length > 1:
            run.step(SequenceRows(tokens[:-1], 0, table, 0, False))
        shares.append(SequenceRows(tokens[-1:], length - 1, table, length - 1, True))
    return shares


def through_torch(run: PagedRun, shares: list[SequenceRows]) -> torch.Tensor:
    model = run.model
    compiled, model._few_rows, model._many_rows = (model._few_rows, model._many_rows), None, None
    try:
        return run.step(*shares)
    finally:
        model._few_rows, model._many_rows = compiled


@pytest.mark.parametrize("family", COMPILED)
@given(block_size=st.sampled_from([16, 32]),
       lengths=st.lists(st.one_of(st.integers(1, LENGTH_MAX), st.sampled_from([1, 2, 16, 17, WINDOW, WINDOW + 1])),
                        min_size=1, max_size=20))
@settings(max_examples=4, deadline=None)
def test_a_step_is_as_near_to_float32_as_torchs_own(family: str, block_size: int, lengths: list[int]) -> None:
    run = PagedRun(compiled_model(family, block_size))
    shares = decoding(run, lengths)
    assert run.model._few_rows is not None
    assert run.model._few_rows.takes(run.batch(*shares), run.storage)
    found, other = run.step(*shares), through_torch(run, shares)
    exact = torch.stack([exact_logits(family, salt)[length - 1] for salt, length in enumerate(lengths)])
    assert rms(found - exact) <= 1.2 * rms(other - exact) + 0.002 * rms(exact)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_window", "llama_gelu", "phi4", "olmo2"])
def test_what_a_step_writes_is_what_torch_would_have_written(family: str) -> None:
    """Keys and values of the new position, and zeros behind it in a block that it opens; nothing anywhere else."""
    ours, theirs = PagedRun(compiled_model(family)), PagedRun(compiled_model(family))
    for run in (ours, theirs):
        for store in (*run.storage.keys, *run.storage.values):
            store.fill_(3.0)
    ours_step, theirs_step = decoding(ours, [33, 40, 16, 1]), decoding(theirs, [33, 40, 16, 1])
    before = [store.clone() for store in ours.storage.keys]
    ours.step(*ours_step)
    through_torch(theirs, theirs_step)
    for mine, other in zip((*ours.storage.keys, *ours.storage.values), (*theirs.storage.keys, *theirs.storage.values),
                           strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * float(other.float().abs().max()))
        assert torch.equal(mine == 0, other == 0)
    written = torch.zeros_like(before[0], dtype=torch.bool)
    for share in ours_step:
        block, slot = share.block_table[share.start // 16], share.start % 16
        written[block, slot:] = True
    for mine, was in zip(ours.storage.keys, before, strict=True):
        assert torch.equal(mine[~written], was[~written])


def test_a_position_that_is_there_already_is_not_written() -> None:
    run = PagedRun(compiled_model("llama"))
    [share] = decoding(run, [20])
    expected = run.step(share)
    before = [store.clone() for store in (*run.storage.keys, *run.storage.values)]
    found = run.step(SequenceRows(share.token_ids, share.start, share.block_table, share.start + 1, True))
    assert torch.equal(found, expected)
    assert all(map(torch.equal, (*run.storage.keys, *run.storage.values), before))


@pytest.mark.parametrize("family", ["gemma2", "smollm3", "olmo2_grouped"])
def test_threads_change_nothing(family: str) -> None:
    """Nor does what else is in the batch: each row is computed as if it were alone."""
    lengths = [1, 70, 33, 16, 120]
    results = []
    for threads in (1, 2, 5):
        run = PagedRun(compiled_model(family, threads=threads))
        shares = decoding(run, lengths)
        results += [run.step(*shares) for _ in range(3)]
        results.append(torch.cat([run.step(share) for share in shares]))
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_what_is_no_number_stays_in_its_row() -> None:
    run = PagedRun(compiled_model("gemma3"))
    shares = decoding(run, [20, 30, 40])
    expected = run.step(*shares)
    run.storage.keys[0][shares[1].block_table[0]] = torch.nan
    found = run.step(*shares)
    assert torch.isnan(found[1]).all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_steps_of_another_kind_go_through_torch() -> None:
    run = PagedRun(compiled_model("llama"))
    few_rows = run.model._few_rows
    assert few_rows is not None
    table = run.new_table(10)
    plain = SequenceRows([5], 3, table, 3, True)
    others = [SequenceRows([5, 6], 3, table, 3, True), SequenceRows([5], 3, table, 3, False),
              SequenceRows([5], 3, table, 3, True, adapter=b"another"),
              SequenceRows([5], 3, table, 3, True, num_scored=1), SequenceRows([5], 3, table, 3, True, pools=True)]
    assert few_rows.takes(run.batch(plain), run.storage)
    assert not any(few_rows.takes(run.batch(plain, other), run.storage) for other in others)
    assert not few_rows.takes(run.batch(*[plain] * 33), run.storage)
    far = [SequenceRows([5], 40_000, range(2501), 40_000, True)]
    assert few_rows.takes(run.batch(*far), run.storage)
    assert not few_rows.takes(run.batch(*far * 2), run.storage)
    blocks_of_eight = PagedRun(load_model(resolve_model(str(folder_of("llama"))), device="cpu", block_size=8))
    assert not few_rows.takes(run.batch(plain), blocks_of_eight.storage)


def test_without_numba_torch_serves_the_same(monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.INFO):
        model = load_model(resolve_model(str(folder_of("gemma3"))), device="cpu")
    assert "numba is not installed" in caplog.text
    assert model._few_rows is None
    run = PagedRun(model)
    found = run.step(*decoding(run, [40, 50]))
    exact = torch.stack([exact_logits("gemma3", salt)[length - 1] for salt, length in enumerate([40, 50])])
    assert rms(found - exact) <= 0.1 * rms(exact)


def test_code_is_kept_only_where_a_folder_can_be_made(tmp_path: Path) -> None:
    assert Path(place_for_code(tmp_path)).parent == tmp_path
    assert Path(place_for_code(tmp_path)).is_dir()
    (tmp_path / "file").touch()
    assert place_for_code(tmp_path / "file") == ""


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Heads of 24 numbers, another dtype, strict mode, and small models, read faster than numba is loaded."""
    def few_rows_of(folder: Any, **how: Any) -> Any:
        return load_model(resolve_model(str(folder)), device="cpu", **how)._few_rows

    with caplog.at_level(logging.INFO):
        assert few_rows_of(tiny_model_folder("qwen3")) is None
    assert "its sizes are no multiples of 32" in caplog.text
    assert few_rows_of(folder_of("llama"), dtype="float32") is None
    assert few_rows_of(folder_of("llama"), exactness="strict") is None
    monkeypatch.undo()
    assert few_rows_of(folder_of("llama")) is None


def test_compiled_code_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    model = compiled_model("llama")
    from worker.model.compiled.decoder import CompiledDecoder

    logits = CompiledDecoder.logits
    monkeypatch.setattr(CompiledDecoder, "logits", lambda *given: logits(*given).roll(1, -1))
    assert model._compact is not None
    assert compile_decoder(model._compact, model.spec, default_cache_dir()) is None
    assert "of the logits' spread" in caplog.text


@given(begin=st.integers(0, 40), length=st.integers(1, 200), gap=st.sampled_from([0, 16, 64, 512]),
       seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_sums_are_the_same_wherever_arrays_lie(begin: int, length: int, gap: int, seed: int) -> None:
    """Loops that store are compiled twice, for arrays apart and for arrays that may overlap."""
    from worker.model.compiled.kernels import softmax_into
    from worker.model.compiled.prompt_attention import weigh

    scores = (3 * np.random.default_rng(seed).standard_normal(240)).astype(np.float32)
    found, span = [], (begin, min(begin + length, len(scores)))
    for apart in (gap, 4096):
        room = np.zeros(8192, dtype=np.uint8)
        given_scores = room[:scores.nbytes].view(np.float32)
        weights = room[scores.nbytes + apart:][:scores.nbytes // 2].view(np.uint16)
        given_scores[:] = scores
        total = softmax_into(given_scores, *span, weights)
        given_scores[:], seen = scores, np.array([0, 1], dtype=np.float32)
        weigh((given_scores, weights), span, (np.float32(1), np.float32(0)), seen)
        found.append((total, *seen))
    assert found[0] == found[1]


@given(num_out=st.integers(1, 200), num_in=st.integers(1, 6).map(lambda count: count * 32), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_packed_weight_lies_as_panels(num_out: int, num_in: int, seed: int) -> None:
    weight = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        assert PackedLinear(weight).panels is not None
    finally:
        torch.set_num_threads(threads)
    another = torch.ops.mkldnn._reorder_linear_weight(weight + 1, 16)
    assert panels_address(another, weight) is None
