"""Chooses the next token of every sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.prompt.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """One row of logits and what decides its token. `output_index` counts the choice's output tokens from 0."""

    params: SamplingParams
    choice: int
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    banned_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """The chosen token; `logprob` and `top` (best first) only where the row's params ask for logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sample]:
    """One token per row of `logits` [num_rows, vocab] float32, in order."""
    assert logits.shape[0] == len(rows)
    return [Sample(int(token_id)) for token_id in logits.argmax(dim=-1)]
