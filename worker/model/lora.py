"""LoRA adapters over a model's linear layers, row by row: one batch may mix adapters and rows without any.

Owns the adapters' tensors and which rows of the present pass are whose. An adapter is found by its content digest,
the very key that stands in its blocks' hashes: what computes a block and what it is called cannot differ. A low-rank
product of its own is added beside the base layer's, so the base weights stay as they are, packed or fused.

In strict mode every row goes through each product and only an adapter's own take the result, so that a row's bits do
not depend on who shares the batch. Documented cost: two thin products per adapted layer and adapter in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from worker.model.batch_layout import BatchLayout
from worker.model.compact_decoder import CompactDecoder, CompactLayer
from worker.model.forward_batch import ForwardBatch
from worker.model.linear import ACTIVATIONS, Linear
from worker.model.lora_folder import LoraAdapter, LowRank


@dataclass(frozen=True, slots=True)
class _Rows:
    """An adapter's rows in the present pass; None: all of them."""

    digest: bytes
    rows: torch.Tensor | None


class LoraLayers:
    """The adapters of one model. begin() before each pass; narrow() when a pass goes on with some rows only."""

    def __init__(self, adapters: Iterable[LoraAdapter], *, dtype: torch.dtype, device: torch.device,
                 computes_all_rows: bool) -> None:
        self._parts: dict[bytes, dict[str, LowRank]] = {
            adapter.digest: {path: LowRank(part.down.to(device, dtype), part.up.to(device, dtype))
                             for path, part in adapter.parts.items()} for adapter in adapters}
        self._computes_all_rows = computes_all_rows
        self._present: list[_Rows] = []
        self._num_rows = 0

    @property
    def paths(self) -> set[str]:
        """Every layer that some adapter changes."""
        return {path for parts in self._parts.values() for path in parts}

    def halve(self, path: str, into: tuple[str, str]) -> None:
        """From now on: what is added to the layer at `path` is added to the first and second half of its outputs,
        each a layer of its own."""
        for parts in self._parts.values():
            if (whole := parts.pop(path, None)) is not None:
                parts.update({half: LowRank(whole.down, up)
                              for half, up in zip(into, whole.up.chunk(2), strict=True)})

    def begin(self, batch: ForwardBatch, layout: BatchLayout) -> None:
        """From now on: this pass's rows. AssertionError for an adapter that is not loaded."""
        rows: dict[bytes, list[torch.Tensor]] = {}
        for sequence, span in zip(batch.sequences, layout.spans, strict=True):
            if sequence.adapter is not None:
                assert sequence.adapter in self._parts, "a sequence names an adapter that is not loaded"
                rows.setdefault(sequence.adapter, []).append(
                    torch.arange(span.first_row, span.first_row + span.num_rows, device=layout.device))
        num_all = self._num_rows = layout.token_ids.shape[-1]
        self._present = [_Rows(digest, None if sum(map(len, parts)) == num_all else torch.cat(parts))
                         for digest, parts in rows.items()]

    def narrow(self, kept: torch.Tensor) -> None:
        """See Narrowing."""
        self._num_rows = len(kept)
        for index, present in enumerate(self._present):
            if present.rows is not None:
                self._present[index] = replace(
                    present, rows=torch.isin(kept, present.rows).nonzero().flatten())

    def is_idle(self, paths: Sequence[str]) -> bool:
        """Whether nothing is added to these layers in this pass."""
        return not any(path in self._parts[present.digest] for present in self._present for path in paths)

    def add(self, path: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out` [rows, out], in place, what the adapters add to this layer for `x` [rows, in]."""
        assert len(x) == self._num_rows, f"{path} got {len(x)} rows of {self._num_rows}: whose they are is not known"
        for present in self._present:
            part = self._parts[present.digest].get(path)
            if part is None:
                continue
            if present.rows is None:
                out += _product(x, part)
            elif self._computes_all_rows:
                out.index_add_(0, present.rows, _product(x, part)[present.rows])
            else:
                out.index_add_(0, present.rows, _product(x[present.rows], part))


def _product(x: torch.Tensor, part: LowRank) -> torch.Tensor:
    return functional.linear(functional.linear(x, part.down), part.up)


class AdaptedLinear(Linear):
    """A Linear of one or more layers end to end, adapters added. `outputs`: where each one's columns are, by path."""

    def __init__(self, plain: Linear, outputs: Mapping[str, slice], layers: LoraLayers) -> None:
        self._plain = plain
        self._paths = tuple(outputs)
        self._outputs = outputs
        self._layers = layers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._plain(x)
        if self._layers.is_idle(self._paths):
            return out
        for path, columns in self._outputs.items():
            self._layers.add(path, x, out[:, columns])
        return out

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """See Linear."""
        if self._layers.is_idle(self._paths):
            return self._plain.activated(x, activation)
        if activation == "silu":
            return functional.silu(self(x), inplace=True)
        return functional.gelu(self(x), approximate=ACTIVATIONS[activation][1])

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._plain.times(x, factor) if self._layers.is_idle(self._paths) else self(x).mul_(factor)

    def plus(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._plain.plus(x, addend) if self._layers.is_idle(self._paths) else self(x).add_(addend)


def adapt_modules(model: Any, layers: LoraLayers) -> None:
    """Let transformers' own modules add what the adapters add."""
    for path in layers.paths:
        model.get_submodule(path).register_forward_hook(_hook(path, layers))


def _hook(path: str, layers: LoraLayers) -> Any:
    def added(_: torch.nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        if not layers.is_idle((path,)):
            layers.add(path, given[0].flatten(0, -2), out.view(-1, out.shape[-1]))
        return out

    return added


def adapt_compact(decoder: CompactDecoder, layers: LoraLayers, *, prefix: str) -> CompactDecoder:
    """The decoder with adapters; `prefix` is where transformers' model keeps its layers ("model.layers")."""
    adapted = tuple(_adapted(layer, f"{prefix}.{index}", layers) for index, layer in enumerate(decoder.layers))
    return replace(decoder, layers=adapted, adapters=layers)


def _adapted(layer: CompactLayer, path: str, layers: LoraLayers) -> CompactLayer:
    part = layer.attention
    heads, kv_heads = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
    inside = f"{path}.self_attn"
    qkv = {f"{inside}.q_proj": slice(heads), f"{inside}.k_proj": slice(heads, heads + kv_heads),
           f"{inside}.v_proj": slice(heads + kv_heads, None), f"{inside}.qkv_proj": slice(None)}
    layers.halve(f"{path}.mlp.gate_up_proj", (f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"))

    def one(plain: Linear, name: str) -> Linear:
        wanted = f"{path}.{name}"
        return AdaptedLinear(plain, {wanted: slice(None)}, layers) if wanted in layers.paths else plain

    attention = replace(part, qkv=AdaptedLinear(part.qkv, qkv, layers)) if layers.paths & qkv.keys() else part
    return replace(layer, attention=attention, attention_out=one(layer.attention_out, "self_attn.o_proj"),
                   gate=one(layer.gate, "mlp.gate_proj"), up=one(layer.up, "mlp.up_proj"),
                   down=one(layer.down, "mlp.down_proj"))
