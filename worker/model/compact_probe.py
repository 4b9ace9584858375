"""Is a compact decoder the model it was made from? Asked part by part, so that rounding cannot hide a mistake.

Over a whole model in 16 bits rounding adds up to a tenth of the logits' spread, and a layer turned the wrong way may
be less. So every part gets the very input that it had in the transformers model: embedding, each layer, norm, head. A
layer's yardstick is itself in float32, and what transformers' own layer loses in 16 bits against that. Rows stand at
positions far apart, some beyond any window. Owns the weights of nothing: what is compared was given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from worker.model.attention import AttentionCall
from worker.model.batch_layout import BatchLayout

# Neighbours, and places far enough apart for slow frequencies and windows. What a model is too short for is left out.
POSITIONS = (0, 1, 5, 6, 40, 41, 42, 90, 700, 701, 1500, 5000)
# A right layer's error against float32 may be so many times that of transformers' own, plus a share of its output.
MARGIN = 2.0
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-9, torch.float16: 2**-12}
# Embedding, final norm and head are a product or two each: their error as a share of their output.
END_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}

Attend = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class DensePass:
    """An AttentionPass without storage: every row sees itself and the rows before it, windows by `positions`.
    Remembers the calls."""

    positions: torch.Tensor
    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls[call.layer] = call
        group = call.query.shape[0] // call.key.shape[0]
        key, value = (each.repeat_interleave(group, 0).float() for each in (call.key, call.value))
        scores = call.query.float() @ key.transpose(1, 2) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        rows, columns = self.positions.unsqueeze(1), self.positions
        hidden = columns > rows
        if call.window is not None:
            hidden = hidden | (columns <= rows - call.window)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return (weights @ value).to(call.query.dtype).transpose(0, 1).contiguous()


@dataclass(slots=True)
class Watched:
    """What went through a transformers model: each layer's arguments, the last one's output, `hidden` after the final
    norm [rows, dim], `logits` [rows, vocab], and the attention calls."""

    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    last: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    calls: dict[int, AttentionCall] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerTruth:
    """A layer's input [rows, dim], its output in float32, and how far from it (root mean square) is near enough."""

    given: torch.Tensor
    exact: torch.Tensor
    allowed: float


def probe_layout(config: Any, device: torch.device) -> BatchLayout:
    """A few rows far apart, all wanted, nothing to write."""
    positions = [position for position in POSITIONS if position < config.max_position_embeddings]
    rows = torch.arange(len(positions), device=device)
    return BatchLayout(device, len(rows), (), token_ids=((rows * 7919 + 13) % int(config.vocab_size)).unsqueeze(0),
                       position_ids=torch.tensor([positions], device=device), write_rows=rows[:0],
                       write_slots=rows[:0], logits_rows=rows, num_logits=len(rows))


def watch(model: Any, layout: BatchLayout) -> Watched:
    """Run the transformers model on the layout's rows."""
    seen = Watched()
    dense = DensePass(layout.position_ids[0], seen.calls)
    with _watching(model.base_model, seen):
        seen.logits = model(input_ids=layout.token_ids, position_ids=layout.position_ids, use_cache=False,
                            attention_pass=dense, logits_to_keep=layout.logits_rows).logits[0]
    return seen


@contextmanager
def _watching(base: Any, seen: Watched) -> Iterator[None]:
    def given(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.given.append((args, kwargs))

    def last(_: Any, args: Any, out: Any) -> None:
        seen.last = _first(out)[0]

    def ended(_: Any, args: Any, out: Any) -> None:
        seen.hidden = out.last_hidden_state[0]

    hooks = [layer.register_forward_pre_hook(given, with_kwargs=True) for layer in base.layers]
    hooks += [layer.register_forward_hook(last) for layer in list(base.layers)[-1:]]
    hooks.append(base.register_forward_hook(ended))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layer_truth(layer: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> LayerTruth:
    """What a transformers layer should give. Its input is made small against what the layer adds to it, or rounding
    of the sum would be all there is to see."""
    (hidden, *more), kwargs = given
    exact = copy.deepcopy(layer).float()
    added = _run(exact, hidden.float(), more, kwargs) - hidden.float()
    shrunk = hidden * 2.0 ** min(0, math.floor(math.log2(max(rms(added), 1e-9) / max(rms(hidden), 1e-9))))
    truth = _run(exact, shrunk.float(), more, kwargs)
    own = rms(_run(layer, shrunk, more, kwargs).float() - truth)
    return LayerTruth(shrunk[0], truth[0], MARGIN * own + ROUNDING[hidden.dtype] * rms(truth))


def _run(layer: Any, hidden: torch.Tensor, more: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """In the dtype of `hidden`, whatever the model's own was."""
    more, kwargs = tree_map(lambda each: each.to(hidden.dtype) if isinstance(each, torch.Tensor)
                            and each.is_floating_point() else each, (more, kwargs))
    return _first(layer(hidden, *more, **kwargs))


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def is_near(found: torch.Tensor, truth: LayerTruth) -> bool:
    return rms(found.float() - truth.exact) <= truth.allowed    # NaN is not


def is_same_end(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of embedding, final norm and head, from equal inputs."""
    return rms(found.float() - expected.float()) <= END_TOLERANCE[expected.dtype] * rms(expected)


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())
