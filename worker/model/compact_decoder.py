"""A decoder of the Llama kind in few operators: what fast mode runs in place of transformers' modules.

Per layer: one product for queries, keys and values, rope on queries and keys together, attention, and products that
take activation, gate and residual along. A third of the operators that transformers' modules need, which is what
counts when a step has few rows. Owns its weights (compact_builder.py takes them out of a transformers model).
Never used in strict mode. Equal to transformers' own modules up to rounding; the builder checks that on each model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.model.attention import AttentionCall, AttentionPass
from worker.model.batch_layout import BatchLayout
from worker.model.linear import Linear

Norm = Callable[[torch.Tensor], torch.Tensor]
# For one kind of layer: position ids [1, rows] to cosines and sines [1, rows, dim], as transformers' rope modules do;
# of heads that are wider, the first `dim` numbers are turned.
Rope = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Narrowing(Protocol):
    """Who has to know that a pass goes on with some of its rows only."""

    def narrow(self, kept: torch.Tensor) -> None:
        """With these rows, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """One layer's attention. `rope` indexes CompactDecoder.ropes. Some families norm queries and keys, [rows, heads,
    dim], head by head or whole."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    rope: int
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None

    def attend(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor],
               attention_pass: AttentionPass) -> torch.Tensor:
        """[rows, heads * head_dim], before the output product."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        mixed = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        turned = mixed[:, :heads + kv_heads]
        if self.query_norm is not None and self.key_norm is not None:
            turned = torch.cat((self.query_norm(turned[:, :heads]), self.key_norm(turned[:, heads:])), 1)
        turned = _turned(turned, *rope).transpose(0, 1)
        call = AttentionCall(layer=self.layer, query=turned[:heads], key=turned[heads:],
                             value=mixed[:, heads + kv_heads:].transpose(0, 1), scaling=self.scaling,
                             window=self.window, softcap=self.softcap)
        return attention_pass.attend(call).flatten(1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((_turned(x[..., :size], cos, sin), x[..., size:]), -1)
    return torch.addcmul(x * cos, x.roll(size // 2, -1), sin).to(x.dtype)    # OLMo's cosines are float32


@dataclass(frozen=True, slots=True)
class CompactLayer:
    """One layer. `after_attention` and `after_mlp` are Gemma's and OLMo's norms of what is added to the residual;
    OLMo has no others (`unnormed`)."""

    attention: AttentionPart
    before_attention: Norm
    attention_out: Linear
    after_attention: Norm | None
    before_mlp: Norm
    gate: Linear
    up: Linear
    down: Linear
    after_mlp: Norm | None
    activation: str
    residual_multiplier: float

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer after its attention: row by row, so rows nobody needs may be left out."""
        x = self._add(x, attended, self.attention_out, self.after_attention)
        inner = self.before_mlp(x)
        gated = self.up.times(inner, self.gate.activated(inner, self.activation))
        return self._add(x, gated, self.down, self.after_mlp)

    def _add(self, x: torch.Tensor, inner: torch.Tensor, product: Linear, norm: Norm | None) -> torch.Tensor:
        if norm is None and self.residual_multiplier == 1.0:
            return product.plus(inner, x)
        added = product(inner) if norm is None else norm(product(inner))
        return torch.add(x, added, alpha=self.residual_multiplier)


@dataclass(frozen=True, slots=True)
class CompactDecoder:
    """The whole model. `embed` takes token ids [rows]; some families scale logits, some soft-cap them."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    embedding_multiplier: float
    ropes: tuple[Rope, ...]
    layers: tuple[CompactLayer, ...]
    final_norm: Norm
    head: Linear
    logits_scaling: float
    logits_softcap: float | None
    adapters: Narrowing | None = None

    def logits(self, layout: BatchLayout, attention_pass: AttentionPass, *,
               see_hidden: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Logits [wanted rows, vocab] of the layout's rows, after every layer's K/V went to the pass.

        `see_hidden` is shown the last hidden states of all rows, normed as the head gets them.
        """
        x = self.embedded(layout.token_ids[0])
        ropes = [signed_rope(rope(x, layout.position_ids)) for rope in self.ropes]
        for layer in self.layers:
            attention = layer.attention
            attended = attention.attend(layer.before_attention(x), ropes[attention.rope], attention_pass)
            if layer is self.layers[-1] and len(layout.logits_rows) < len(x) and see_hidden is None:
                x, attended = x[layout.logits_rows], attended[layout.logits_rows]
                if self.adapters is not None:
                    self.adapters.narrow(layout.logits_rows)
            x = layer.finish(x, attended)
        if see_hidden is None:
            return self.logits_of(self.final_norm(x))
        see_hidden(hidden := self.final_norm(x))
        return self.logits_of(hidden[layout.logits_rows])

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the first layer gets."""
        x = self.embed(token_ids)
        return x if self.embedding_multiplier == 1.0 else x * self.embedding_multiplier

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states after the final norm."""
        logits = self.head(hidden)
        if self.logits_scaling != 1.0:
            logits = logits / self.logits_scaling
        if self.logits_softcap is not None:
            logits = torch.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits


def signed_rope(rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [rows, 1, dim], the first half of the sines negated: x * cos + roll(x) * sin turns x."""
    cos, sin = (each[0].unsqueeze(1) for each in rope)
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
