"""What the model thought of tokens that were given: log-probabilities of a prompt. Never chooses anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_ROWS_AT_ONCE = 16    # a copy of these rows' logits is made


class Score(NamedTuple):
    """`rank` 1 is the likeliest token; `top` are (token id, logprob), best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def score(logits: torch.Tensor, targets: Sequence[int], num_top: int) -> list[Score]:
    """Row i of `logits` [rows, vocab] scores `targets[i]`; the log-softmax of the unmodified logits."""
    assert len(logits) == len(targets), f"{len(logits)} rows of logits for {len(targets)} tokens"
    scored: list[Score] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        some = logits[start:start + _ROWS_AT_ONCE]
        ids = torch.tensor(targets[start:start + _ROWS_AT_ONCE], device=logits.device).unsqueeze(-1)
        logprobs = torch.log_softmax(some, dim=-1)
        chosen = logprobs.gather(-1, ids)
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        values, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
        for logprob, rank, row_ids, row in zip(chosen.flatten().tolist(), ranks.tolist(), top_ids.tolist(),
                                               values.tolist(), strict=True):
            scored.append(Score(logprob, rank, tuple(zip(row_ids, row, strict=True))))
    return scored
