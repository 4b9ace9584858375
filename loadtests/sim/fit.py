"""A cost model from what a live worker took: the formula of cost_model.py, fitted to measured prefills and steps.

Owns the equations and the fit. It must never measure. Reading the weights is not told apart from the floor: on a CPU
with a small model computing is the larger of the two at any number of rows.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtests.sim.cost_model import CostModel, pairs_of

# request, step, position, pair, context, row: see cost_model.py; the first is what a request takes beside its steps.
_NUM_TERMS = 6


@dataclass(frozen=True, slots=True)
class Prefill:
    """A cold prompt alone: until its first token."""

    num_tokens: int
    seconds: float

    def terms(self, max_batch_tokens: int) -> list[float]:
        """The coefficients of its equation. A long prompt takes several steps; each position attends to all before
        it, however they are cut."""
        num_steps = -(-self.num_tokens // max_batch_tokens)
        return [1.0, float(num_steps), float(self.num_tokens), pairs_of(0, self.num_tokens), 0.0, 0.0]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of so many streams, with so many tokens of context each."""

    num_streams: int
    context_tokens: float
    seconds: float

    def terms(self, _: int) -> list[float]:
        streams = float(self.num_streams)
        return [0.0, 1.0, streams, 0.0, streams * self.context_tokens, streams]


@dataclass(frozen=True, slots=True)
class Fit:
    """The model, what a request takes beside its steps, and how far measurements lie from it (mean, relative)."""

    model: CostModel
    request_s: float
    mean_error_ratio: float
    num_samples: int


def fit(samples: Sequence[Prefill | DecodeStep], *, max_batch_tokens: int, max_running: int) -> Fit:
    """Least relative squares, no term below zero. ValueError when the samples cannot tell."""
    if not any(isinstance(sample, Prefill) for sample in samples) or len(samples) < _NUM_TERMS:
        raise ValueError("too few measurements for a cost model")
    seconds = np.array([sample.seconds for sample in samples])
    terms = np.array([sample.terms(max_batch_tokens) for sample in samples]) / seconds[:, None]
    found = least_squares(terms, np.ones(len(samples)))
    request_s, floor_s, token_s, pair_s, context_s, row_s = (float(value) for value in found)
    model = CostModel("fitted", f"{len(samples)} measurements of a live worker", floor_s=floor_s, weights_s=0.0,
                      token_s=token_s, pair_s=pair_s, context_s=context_s, row_s=row_s,
                      max_batch_tokens=max_batch_tokens, max_running=max_running)
    return Fit(model, request_s, float(np.abs(terms @ found - 1).mean()), len(samples))


def means(samples: Sequence[Prefill | DecodeStep]) -> list[Prefill | DecodeStep]:
    """One sample for each size. Not the median: on a machine that others use, stalls are a part of what requests
    wait for."""
    alike: defaultdict[Prefill | DecodeStep, list[float]] = defaultdict(list)
    for sample in samples:
        alike[replace(sample, seconds=0.0)].append(sample.seconds)
    return [replace(sample, seconds=statistics.fmean(seconds)) for sample, seconds in alike.items()]


def least_squares(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """No term below zero: the most negative one is dropped until none is left."""
    kept = list(range(terms.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept], wanted, rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            whole = np.zeros(terms.shape[1])
            whole[kept] = np.maximum(found, 0.0)
            return whole
        kept.pop(int(found.argmin()))
