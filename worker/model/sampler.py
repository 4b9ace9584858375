"""Chooses the next token of every sequence from its logits.

Order, per row: repetition penalty (as in transformers: over prompt and output, positive logits divided, negative
multiplied), presence and frequency penalties (as OpenAI defines them: over the output so far), logit_bias, banned
tokens, tokens that are not allowed; then greedy, or temperature, top-k, top-p, min-p in transformers' order, each on
what the one before left, and one draw. The draw is counter_random.uniform(seed, choice, output index) put through the
inverse of the cumulated probabilities, so it does not depend on the other rows.
Reported logprobs are those of the raw distribution: the log-softmax of the unmodified logits.
Never sorts a vocabulary when the most likely few hundred tokens settle the matter: a full sort of 262,144 is 21 ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.model.counter_random import uniform
from worker.prompt.sampling_params import SamplingParams

_FIRST_CANDIDATES = 256
_GREEDY_BELOW = 1e-5     # vLLM's rule; far below, a temperature is 0 in float32
_CANDIDATES_GROWTH = 16
_RUN = 512


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """One row of logits and what decides its token. `output_index` counts the choice's output tokens from 0.

    `allowed`: one bit per token id, the lowest bit of a byte first; ids beyond its end are not allowed. At least one
    must be. None allows all.
    """

    params: SamplingParams
    choice: int
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    banned_token_ids: Sequence[int] = ()
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The chosen token; `logprob` and `top` (best first) only where the row's params ask for logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sample]:
    """One token per row of `logits` [num_rows, vocab] float32, in order. `logits` is left as it was."""
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} sequences"
    if not rows:
        return []
    best: list[int] = most_likely(logits).tolist()    # right as it stands for a plain greedy row: the usual case
    samples = []
    for index, row in enumerate(rows):
        token_id = best[index] if _is_plain_greedy(row) else _choose(logits[index], row)
        samples.append(_with_logprobs(token_id, logits[index], row.params.logprobs))
    return samples


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """argmax over the last of two dimensions, the first of equals. torch's own looks at one number at a time, its
    maximum at many: so first the maxima of runs, and then where in the best run it is."""
    num_rows, vocab = logits.shape
    num_runs = vocab // _RUN
    if num_runs < 2:
        return logits.argmax(dim=-1)
    rows, whole = torch.arange(num_rows, device=logits.device), num_runs * _RUN
    runs = logits[:, :whole].view(num_rows, num_runs, _RUN)
    run = runs.amax(dim=-1).argmax(dim=-1)
    best: torch.Tensor = run * _RUN + runs[rows, run].argmax(dim=-1)
    if whole < vocab:
        last = logits[:, whole:].argmax(dim=-1) + whole
        best = torch.where(logits[rows, last] > logits[rows, best], last, best)
    return best


def _is_plain_greedy(row: SamplerRow) -> bool:
    return row.params.temperature < _GREEDY_BELOW and not _is_modified(row)


def _is_modified(row: SamplerRow) -> bool:
    params = row.params
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
                or params.logit_bias or row.banned_token_ids or row.allowed is not None)


def _choose(logits: torch.Tensor, row: SamplerRow) -> int:
    if _is_modified(row):
        logits = _modified(logits, row)
    if row.params.temperature < _GREEDY_BELOW:
        return int(logits.argmax())
    draw = uniform(row.params.seed, row.choice, row.output_index)
    # The best logit is taken off first, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.max()) / row.params.temperature
    params = row.params
    if params.top_k is None and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw_from(torch.softmax(scaled, dim=-1), draw)
    probabilities, token_ids = _candidates(scaled, params)
    return int(token_ids[_draw_from(probabilities, draw)])


def _modified(logits: torch.Tensor, row: SamplerRow) -> torch.Tensor:
    """A copy of the row's logits after penalties, bias and bans."""
    logits, params = logits.clone(), row.params
    if params.repetition_penalty != 1.0:
        seen = _ids(set(row.prompt_token_ids).union(row.output_token_ids), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        counts = Counter(row.output_token_ids)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(counts, logits)] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(params.logit_bias, logits)] += bias
    if row.banned_token_ids:
        logits[_ids(row.banned_token_ids, logits)] = -torch.inf
    if row.allowed is not None:
        logits.masked_fill_(_not_allowed(row.allowed, logits), -torch.inf)
    return logits


def _not_allowed(allowed: bytes, like: torch.Tensor) -> torch.Tensor:
    """Bool [vocab]: the bits of `allowed` turned round."""
    vocab = like.shape[-1]
    packed = torch.frombuffer(bytearray(allowed), dtype=torch.uint8).to(like.device)
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=like.device) & 1
    closed = torch.ones(vocab, dtype=torch.bool, device=like.device)
    known = min(vocab, bits.numel())
    closed[:known] = bits.flatten()[:known] == 0
    return closed


def _ids(token_ids: Sequence[int] | set[int] | dict[int, float] | Counter[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)


def _candidates(scaled: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k, top-p and min-p leave: probabilities, best first and not normalised, and their token ids."""
    vocab = scaled.shape[-1]
    limit = vocab if params.top_k is None else min(params.top_k, vocab)
    # Without top-k the probabilities are shares of the whole vocabulary, known before any candidate is.
    log_total = torch.logsumexp(scaled, dim=-1) if params.top_k is None else None
    count = min(_FIRST_CANDIDATES, limit) if params.top_k is None else limit
    while True:
        values, token_ids = scaled.topk(count)
        total = torch.logsumexp(values, dim=-1) if log_total is None else log_total
        probabilities = (values - total).exp()
        kept = _num_kept(probabilities, params)
        if kept < count or count == limit:
            return probabilities[:kept], token_ids[:kept]
        count = min(count * _CANDIDATES_GROWTH, limit)


def _num_kept(probabilities: torch.Tensor, params: SamplingParams) -> int:
    """How many of the leading candidates top-p and then min-p keep; at least one."""
    kept = len(probabilities)
    if params.top_p < 1.0:
        before = probabilities.double().cumsum(dim=-1) - probabilities
        kept = int((before < params.top_p).sum())    # the one that crosses top_p stays
    if params.min_p > 0.0:
        kept = min(kept, int((probabilities >= params.min_p * probabilities[0]).sum()))
    return max(1, kept)


def _draw_from(probabilities: torch.Tensor, draw: float) -> int:
    """The index at which the cumulated probabilities pass `draw` times their sum."""
    cumulated = probabilities.double().cumsum(dim=-1)    # float32 would lose the tail of a large vocabulary
    index = int(torch.searchsorted(cumulated, cumulated[-1] * draw, right=True))
    if index < len(probabilities):
        return index
    return int(probabilities.nonzero()[-1])    # the product was rounded up to the whole sum


def _with_logprobs(token_id: int, logits: torch.Tensor, num_top: int | None) -> Sample:
    if num_top is None:
        return Sample(token_id)
    logprobs = torch.log_softmax(logits, dim=-1)
    values, token_ids = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return Sample(token_id, float(logprobs[token_id]), top)
