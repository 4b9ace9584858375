"""The compact decoder: which models it takes, what happens to those it does not, and shared beginnings in a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.paged_runs import PagedRun
from tests.support.tiny_models import FAMILIES, reference_logits, tiny_model_folder, tiny_token_ids
from worker.model import compact_builder, loader
from worker.model.compact_builder import NotCompact, build_compact
from worker.model.compact_decoder import CompactDecoder, CompactLayer
from worker.model.forward_batch import SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.model.paged_model import PagedModel

LENGTH = 70


def load(family: str, dtype: str = "float32", exactness: str = "fast") -> PagedModel:
    return load_model(resolve_model(str(tiny_model_folder(family))), dtype=dtype, device="cpu", exactness=exactness)


def logits_of(model: PagedModel) -> torch.Tensor:
    run, tokens = PagedRun(model), tiny_token_ids(LENGTH)
    return run.cut(tokens, run.new_table(LENGTH), [40, 1, LENGTH - 41])


def transformers_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    folder = resolve_model(str(tiny_model_folder(family)))
    return loader._load_weights(folder, dtype, torch.device("cpu"))


# Experts, latents: these run through transformers' modules.
NOT_COMPACT = {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"}


@pytest.mark.parametrize("family", sorted(NOT_COMPACT))
def test_what_is_of_another_kind_says_so_and_runs_all_the_same(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(family)._compact is None
    assert "runs through transformers' own modules" in caplog.text


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_COMPACT])
def test_every_family_is_compact_in_fast_mode_alone(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(family)._compact is not None
        assert load(family, "bfloat16")._compact is not None
        assert load(family, exactness="strict")._compact is None
    of_longrope = ("its longrope rope gives every key another value", "original_max_position_embeddings")
    assert not [said for said in caplog.messages if not any(each in said for each in of_longrope)]


def damaged(model: Any, kind: str) -> None:
    layer = model.base_model.layers[1]
    if kind == "another part":
        layer.self_attn.gate = torch.nn.Identity()
    elif kind == "another product":
        layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj)
    elif kind == "another norm":
        layer.input_layernorm.forward = lambda x: x * 0.5
    else:
        layer.mlp.forward = lambda x: -x      # every part by its name, and yet another model


@pytest.mark.parametrize(("kind", "consumed"), [("another part", False), ("another product", False),
                                                ("another norm", True), ("another sum", True)])
def test_what_it_does_not_know_it_does_not_take(kind: str, consumed: bool) -> None:
    model = transformers_model("llama")
    damaged(model, kind)
    with pytest.raises(NotCompact) as refused:
        build_compact(model, torch.device("cpu"))
    assert refused.value.consumed is consumed


def attention_with(layer: CompactLayer, **changes: Any) -> CompactLayer:
    return replace(layer, attention=replace(layer.attention, **changes))


def headwise(whole: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = whole.norm.weight.view(-1, len(whole.norm.weight) // 4)
    return lambda x: torch.rms_norm(x, x.shape[-1:], None, whole.norm.eps) * weight


# What a conversion might get a little wrong in one layer: the family it is tried on, and what becomes of its layer 1.
LAYER_MISTAKES: dict[str, tuple[str, Callable[[CompactLayer], CompactLayer]]] = {
    "a rope where there is none": ("smollm3", lambda layer: attention_with(layer, rope=0)),
    "the other kind's rope": ("gemma3", lambda layer: attention_with(layer, rope=1 - layer.attention.rope)),
    "scores 10% too large": ("llama", lambda layer: attention_with(layer, scaling=layer.attention.scaling * 1.1)),
    "a window forgotten": ("mistral", lambda layer: attention_with(layer, window=None)),
    "scores not capped": ("gemma2", lambda layer: attention_with(layer, softcap=None)),
    "queries not normed": ("qwen3", lambda layer: attention_with(layer, query_norm=lambda x: x)),
    "gate and up the other way round": ("llama", lambda layer: replace(layer, gate=layer.up, up=layer.gate)),
    "a fused product's halves swapped": ("phi3", lambda layer: replace(layer, gate=layer.up, up=layer.gate)),
    "another activation": ("llama", lambda layer: replace(layer, activation="gelu")),
    "a residual 3% too large": ("granite", lambda layer: replace(
        layer, residual_multiplier=layer.residual_multiplier * 1.03)),
    "a norm left out": ("gemma2", lambda layer: replace(layer, after_mlp=lambda x: x)),
    "norms before instead of behind": ("olmo2", lambda layer: replace(
        layer, before_mlp=layer.after_mlp, after_mlp=None)),
    "a norm of queries head by head": ("olmo2", lambda layer: attention_with(
        layer, query_norm=headwise(layer.attention.query_norm))),
}
DECODER_MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings not multiplied": ("granite", {"embedding_multiplier": 1.0}),
    "logits not scaled": ("granite", {"logits_scaling": 1.0}),
    "logits not capped": ("gemma2", {"logits_softcap": None}),
    "final norm left out": ("llama", {"final_norm": lambda x: x}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", LAYER_MISTAKES)
def test_a_layer_that_is_a_little_wrong_is_refused(mistake: str, dtype: torch.dtype,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rounding over the whole model would be larger than what the mistake does to its logits."""
    family, spoil = LAYER_MISTAKES[mistake]
    take = compact_builder._take_layer

    def taking(layer: Any, call: Any, *how: Any) -> CompactLayer:
        taken = take(layer, call, *how)
        return spoil(taken) if call.layer == 1 else taken

    monkeypatch.setattr(compact_builder, "_take_layer", taking)
    with pytest.raises(NotCompact, match="layer 1 would compute something else"):
        build_compact(transformers_model(family, dtype), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", DECODER_MISTAKES)
def test_a_wrong_beginning_or_end_is_refused(mistake: str, dtype: torch.dtype,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = DECODER_MISTAKES[mistake]
    monkeypatch.setattr(compact_builder, "CompactDecoder", lambda **parts: CompactDecoder(**{**parts, **changes}))
    with pytest.raises(NotCompact, match="is of another kind"):
        build_compact(transformers_model(family, dtype), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["another part", "another norm"])
def test_a_refused_model_is_served_by_transformers_modules(kind: str, monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """Its weights are there, loaded again if the attempt took them, and the log says so."""
    def refusing(model: Any, device: torch.device) -> Any:
        damaged(model, kind)
        return build_compact(model, device)

    monkeypatch.setattr(loader, "build_compact", refusing)
    with caplog.at_level(logging.WARNING):
        model = load("qwen3")
    assert "transformers' own modules" in caplog.text
    assert model._compact is None
    expected = reference_logits(tiny_model_folder("qwen3"), tiny_token_ids(LENGTH))[[39, 40, LENGTH - 1]]
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama_mqa", "gemma2", "gemma3", "qwen2_window"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_on_a_common_beginning(family: str, dtype: str) -> None:
    """Five sequences on one prefix of six blocks, a stranger and a prompt in one pass, against each one alone."""
    run = PagedRun(load(family, dtype))
    beginning = tiny_token_ids(96, salt=5)
    first = run.new_table(96)
    run.cut(beginning, first, [96])
    shares = []
    for salt, own in enumerate([1, 9, 16, 30, 17], start=1):
        tokens = [*beginning, *tiny_token_ids(own + 1, salt=salt)]
        table = run.new_table(len(tokens), prefix=first)
        run.cut(tokens[:-1], table, [own], start=96)
        shares.append(SequenceRows(tokens[-1:], len(tokens) - 1, table, len(tokens) - 1, True))
    stranger, prompt = tiny_token_ids(80, salt=8), tiny_token_ids(20, salt=9)
    table = run.new_table(80)
    run.cut(stranger[:-1], table, [79])
    shares.insert(2, SequenceRows(stranger[-1:], 79, table, 79, True))
    shares.append(SequenceRows(prompt, 0, run.new_table(20), 0, True))
    together = run.step(*shares)
    alone = torch.cat([run.step(share) for share in shares])
    decodes = run.step(*(share for share in shares if len(share.token_ids) == 1))
    tolerance = 1e-4 if dtype == "float32" else 0.05 * float(alone.std())
    assert (together - alone).square().mean().sqrt() <= tolerance
    assert (decodes - alone[:-1]).square().mean().sqrt() <= tolerance
