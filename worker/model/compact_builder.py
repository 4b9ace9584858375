"""Takes a transformers model apart into a CompactDecoder, if it is of a kind that this reads, and checks the result.

A model qualifies by the names of its parts, and then by arithmetic: a few positions are computed both ways before the
transformers model's weights are given up. What does not qualify is served through transformers' modules, with a note.
Never guesses: a part it does not know ends the attempt.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from worker.model.attention import AttentionCall
from worker.model.batch_layout import BatchLayout
from worker.model.compact_decoder import AttentionPart, CompactDecoder, CompactLayer, Norm, Rope, signed_rope
from worker.model.compact_probe import (
    DensePass,
    Watched,
    is_near,
    is_same_end,
    layer_truth,
    probe_layout,
    watch,
)
from worker.model.linear import ACTIVATIONS, Linear, fastest_linear
from worker.model.rms_norm import RmsNorm, WholeNorm, unnormed

# What a layer, its attention and its MLP may consist of. Phi has products in one that others have apart, and names
# what is idle but in training.
_NORMS = {"input_layernorm", "post_attention_layernorm"}
_MORE_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_IDLE = {"resid_attn_dropout", "resid_mlp_dropout"}
_LATE_NORMS = {"post_attention_layernorm", "post_feedforward_layernorm"}
_LAYER_PARTS = [{"self_attn", "mlp", *more} for more in (_NORMS, _NORMS | _IDLE, _NORMS | _MORE_NORMS, _LATE_NORMS)]
_APART, _FUSED = ("q_proj", "k_proj", "v_proj"), "qkv_proj"
_ATTENTION_PARTS = [{*_APART, "o_proj"}, {*_APART, "o_proj", "q_norm", "k_norm"}, {_FUSED, "o_proj"}]
_MLP_PARTS = [{"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}]


class NotCompact(Exception):
    """Why a model stays with transformers' modules. `consumed`: its weights are gone and must be loaded again."""

    def __init__(self, why: str, *, consumed: bool = False) -> None:
        super().__init__(why)
        self.consumed = consumed


@torch.inference_mode()
def build_compact(model: Any, device: torch.device) -> CompactDecoder:
    """A decoder that owns `model`'s weights; `model` loses them as it goes, so that no layer is held twice."""
    base, config = model.base_model, model.config
    layers = list(getattr(base, "layers", ()))
    for layer in layers:
        _check_layer(layer)
    layout = probe_layout(config, device)
    seen = watch(model, layout)
    ropes, kinds = _ropes(base.rotary_emb, config, layers)
    _check_calls(seen.calls, len(layers), *ropes[0](seen.hidden.new_zeros(1, 1), layout.position_ids))
    decoder = CompactDecoder(
        embed=base.embed_tokens, embedding_multiplier=float(getattr(config, "embedding_multiplier", 1.0)),
        ropes=ropes, layers=tuple(_take_checked(layer, seen, (index, kinds[index]), ropes=ropes, config=config)
                                  for index, layer in enumerate(layers)),
        final_norm=_norm(base.norm), head=_take_head(model),
        logits_scaling=float(getattr(config, "logits_scaling", 1.0)),
        logits_softcap=getattr(config, "final_logit_softcapping", None))
    _check_ends(decoder, seen, layout)
    return decoder


def _check_ends(decoder: CompactDecoder, seen: Watched, layout: BatchLayout) -> None:
    """What comes before the first layer and after the last one."""
    (embedded, *_), _ = seen.given[0]
    for name, found, expected in (("embedding", decoder.embedded(layout.token_ids[0]), embedded[0]),
                                  ("final norm", decoder.final_norm(seen.last), seen.hidden),
                                  ("head", decoder.logits_of(seen.hidden), seen.logits)):
        if not is_same_end(found, expected):
            raise NotCompact(f"its {name} is of another kind", consumed=True)


def _take_checked(layer: Any, seen: Watched, which: tuple[int, int], *, ropes: Sequence[Rope],
                  config: Any) -> CompactLayer:
    """The layer of index which[0] with the rope of index which[1]. NotCompact unless it computes what `layer` did."""
    index, kind = which
    dense = seen.given[index][1]["attention_pass"]
    truth = layer_truth(layer, seen.given[index])
    taken = _take_layer(layer, seen.calls[index], kind, config)
    rope = signed_rope(ropes[taken.attention.rope](truth.given, dense.positions.unsqueeze(0)))
    attended = taken.attention.attend(taken.before_attention(truth.given), rope, DensePass(dense.positions))
    if not is_near(taken.finish(truth.given, attended), truth):
        raise NotCompact(f"its layer {index} would compute something else", consumed=True)
    return taken


def _names(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _check_layer(layer: Any) -> None:
    """NotCompact unless every part is known by name, and every product is a plain one."""
    if _names(layer) not in _LAYER_PARTS:
        raise NotCompact(f"{type(layer).__name__} has parts of another kind")
    attention, mlp = layer.self_attn, layer.mlp
    if _names(attention) not in _ATTENTION_PARTS or _names(mlp) not in _MLP_PARTS:
        raise NotCompact(f"{type(attention).__name__} or {type(mlp).__name__} has parts of another kind")
    products = [each for part in (attention, mlp) for name, each in part.named_children() if name.endswith("_proj")]
    if any(type(product) is not torch.nn.Linear for product in products):
        raise NotCompact(f"a product in {type(layer).__name__} is not a plain linear layer")
    if len({product.bias is None for product in _mixing(attention)}) > 1:
        raise NotCompact("only some of queries, keys and values have a bias")


def _mixing(attention: Any) -> list[torch.nn.Linear]:
    """What makes queries, keys and values, in this order."""
    return [getattr(attention, name) for name in (*_APART, _FUSED) if hasattr(attention, name)]


def _check_calls(calls: dict[int, AttentionCall], num_layers: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """NotCompact unless every layer attends, with heads at least as wide as the rope and values as wide as keys."""
    if not num_layers or sorted(calls) != list(range(num_layers)):
        raise NotCompact("its layers do not attend in order")
    for call in calls.values():
        if not call.query.shape[-1] == call.value.shape[-1] >= cos.shape[-1] == sin.shape[-1]:
            raise NotCompact("rope turns more than a head, or values are not as wide as keys")


def _ropes(module: Any, config: Any, layers: Sequence[Any]) -> tuple[tuple[Rope, ...], list[int]]:
    """The model's ropes, and each layer's index into them."""
    if "layer_type" not in inspect.signature(module.forward).parameters:
        def rope(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            turned: tuple[torch.Tensor, torch.Tensor] = module(x, position_ids)
            return turned

        # SmolLM3 turns nothing in some layers.
        return (rope, partial(_no_turn, rope)), [0 if getattr(layer.self_attn, "use_rope", True) else 1
                                                 for layer in layers]
    kinds = list(dict.fromkeys(config.layer_types))
    ropes = tuple(partial(_rope_of_kind, module, kind) for kind in kinds)
    return ropes, [kinds.index(kind) for kind in config.layer_types]


def _no_turn(rope: Rope, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope(x, position_ids)
    return torch.ones_like(cos), torch.zeros_like(sin)


def _rope_of_kind(module: Any, kind: str, x: torch.Tensor,
                  position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turned: tuple[torch.Tensor, torch.Tensor] = module(x, position_ids, kind)
    return turned


def _take_layer(layer: Any, call: AttentionCall, rope: int, config: Any) -> CompactLayer:
    attention, mlp = layer.self_attn, layer.mlp
    before_attention, after_attention, before_mlp, after_mlp = _take_norms(layer)
    query_norm, key_norm = _take_head_norms(attention, call.query.shape[-1])
    part = AttentionPart(
        layer=call.layer, num_heads=call.query.shape[0], num_kv_heads=call.key.shape[0],
        head_dim=call.query.shape[-1], scaling=call.scaling, window=call.window, softcap=call.softcap, rope=rope,
        qkv=_take(*_mixing(attention)), query_norm=query_norm, key_norm=key_norm)
    gate, up = _take_gate_and_up(mlp)
    return CompactLayer(
        attention=part, before_attention=before_attention, attention_out=_take(attention.o_proj),
        after_attention=after_attention, before_mlp=before_mlp, gate=gate, up=up, down=_take(mlp.down_proj),
        after_mlp=after_mlp, activation=_activation(config),
        residual_multiplier=float(getattr(config, "residual_multiplier", 1.0)))


def _take_norms(layer: Any) -> tuple[Norm, Norm | None, Norm, Norm | None]:
    """Before and after attention, before and after the MLP. Which one a name means depends on the others there."""
    late = _norm(layer.post_attention_layernorm)
    if not hasattr(layer, "post_feedforward_layernorm"):
        return _norm(layer.input_layernorm), None, late, None
    after_mlp = _norm(layer.post_feedforward_layernorm)
    if not hasattr(layer, "input_layernorm"):
        return unnormed, late, unnormed, after_mlp
    return _norm(layer.input_layernorm), late, _norm(layer.pre_feedforward_layernorm), after_mlp


def _take_head_norms(attention: Any, head_dim: int) -> tuple[Norm | None, Norm | None]:
    """Of queries and of keys: over each head, or over all of them where one is wider than a head."""
    if not hasattr(attention, "q_norm"):
        return None, None
    query, key = _norm(attention.q_norm), _norm(attention.k_norm)
    if len(query.weight) == len(key.weight) == head_dim:
        return query, key
    return WholeNorm(query), WholeNorm(key)


def _activation(config: Any) -> str:
    name = str(getattr(config, "hidden_activation", None) or config.hidden_act)
    if name not in ACTIVATIONS:
        raise NotCompact(f"its activation is {name!r}", consumed=True)
    return name


def _take(*modules: torch.nn.Linear) -> Linear:
    """The modules as one, which then holds the only copy of their weights."""
    made = fastest_linear([module.weight.data for module in modules],
                          [None if module.bias is None else module.bias.data for module in modules])
    for module in modules:
        module.weight.data = module.weight.data.new_empty(0)
    return made


def _take_gate_and_up(mlp: Any) -> tuple[Linear, Linear]:
    """Two products, also of Phi's one: what follows the first is done while it is still in registers."""
    if not hasattr(mlp, "gate_up_proj"):
        return _take(mlp.gate_proj), _take(mlp.up_proj)
    fused = mlp.gate_up_proj
    biases = (None, None) if fused.bias is None else fused.bias.data.chunk(2)
    gate, up = (fastest_linear([weight], [bias])
                for weight, bias in zip(fused.weight.data.chunk(2), biases, strict=True))
    fused.weight.data = fused.weight.data.new_empty(0)
    return gate, up


def _take_head(model: Any) -> Linear:
    head = model.get_output_embeddings()
    if head.weight is model.base_model.embed_tokens.weight:    # tied: the embedding stays as it is
        return fastest_linear([head.weight.data], [None if head.bias is None else head.bias.data])
    return _take(head)


def _norm(module: Any) -> RmsNorm:
    """The module as torch's fused operator: weights as they are (Llama), or counted from one (Gemma)."""
    weight, eps = module.weight.data, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    shape = tuple(weight.shape)
    x = torch.linspace(-2, 3, weight.numel(), device=weight.device, dtype=weight.dtype)
    expected = module(x).float()
    for candidate in (weight, 1.0 + weight.float()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")    # torch says, once, that float weights take a slower path
            found = functional.rms_norm(x, shape, candidate, eps).float()
        if torch.allclose(found, expected, rtol=2e-2, atol=1e-3):
            return RmsNorm(candidate, eps, weight.dtype)
    raise NotCompact(f"{type(module).__name__} is a norm of another kind", consumed=True)
