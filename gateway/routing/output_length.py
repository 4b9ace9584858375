"""How long answers are, from what requests generated: for those that have not answered yet, and for those midway.

Owns the last answers' lengths of each model. Known approximation: every request of a model is expected to answer
alike; its own `max_tokens` still bounds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

DEFAULT_OUTPUT_TOKENS = 128
NEWEST_WEIGHT = 0.05
MODELS_MAX = 256
LENGTHS_KEPT = 256
PROFILE_RENEWED_EVERY = 8    # answers
LONGER_MIN = 3               # fewer answers that were longer say nothing
LEAST_LEFT_RATIO = 0.25
LENGTHS_FEW = 32             # until so many have ended it is the short ones that have


class LengthProfile:
    """What may be expected of answers like these `lengths`, of which `mean` are expected at first. Sorted and summed
    when it is asked for the first time: only where memory is short is it ever asked."""

    __slots__ = ("_lengths", "_means", "_sums", "mean")

    def __init__(self, lengths: Sequence[int], mean: float) -> None:
        self._lengths = list(lengths)
        self._sums: list[int] = []   # of the longest ones; empty until they are needed
        self._means: tuple[np.ndarray, np.ndarray] | None = None   # likewise
        self.mean = mean

    def left(self, generated: float, expected: int) -> float:
        """Tokens to come of an answer that has `generated` so many, of which `expected` were expected: the mean of
        those that got longer. One that is bounded, or longer than what is known, has a share of it left at least.
        While few lengths are known, one that goes on says that answers are longer than was thought: it has as much
        left as was expected of it, or as it has generated."""
        if not self._sums:
            self._sort()
        least = LEAST_LEFT_RATIO * expected
        if expected >= self.mean - 1:
            num_longer = len(self._lengths) - bisect_right(self._lengths, generated)
            if num_longer >= LONGER_MIN:
                return self._sums[num_longer] / num_longer - generated
            if len(self._lengths) < LENGTHS_FEW:
                least = max(expected, generated)
        left = expected - generated
        return left if left > least else least

    def all_left(self, generated: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """As left(), of many at once."""
        if not self._sums:
            self._sort()
        if self._means is None:
            sums = np.array(self._sums, float)
            self._means = np.array(self._lengths, float), sums / np.maximum(np.arange(len(sums)), 1)
        lengths, means = self._means
        num_longer = len(lengths) - np.searchsorted(lengths, generated, side="right")
        is_unbounded, least = expected >= self.mean - 1, LEAST_LEFT_RATIO * expected
        if len(lengths) < LENGTHS_FEW:
            least = np.where(is_unbounded, np.maximum(expected, generated), least)
        left: np.ndarray = np.where(is_unbounded & (num_longer >= LONGER_MIN), means[num_longer] - generated,
                                    np.maximum(expected - generated, least))
        return left

    def _sort(self) -> None:
        self._lengths.sort()
        self._sums = [0, *accumulate(reversed(self._lengths))]


UNKNOWN_LENGTHS = LengthProfile((), DEFAULT_OUTPUT_TOKENS)


class OutputLength:
    """Mean output tokens by model; DEFAULT_OUTPUT_TOKENS until something was observed."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}
        self._expected: dict[str, int] = {}   # the means as whole tokens
        self._lengths: dict[str, deque[int]] = {}
        self._profiles: dict[str, LengthProfile] = {}
        self._num_observed = 0

    def observe(self, model: str, output_tokens: int) -> None:
        """A request of `model` ended well after so many tokens. Models beyond MODELS_MAX are not learned."""
        if model not in self._mean and len(self._mean) >= MODELS_MAX:
            return
        mean = self._mean.get(model, float(DEFAULT_OUTPUT_TOKENS))
        mean = self._mean[model] = mean + NEWEST_WEIGHT * (output_tokens - mean)
        self._expected[model] = max(1, round(mean))
        lengths = self._lengths.setdefault(model, deque(maxlen=LENGTHS_KEPT))
        lengths.append(output_tokens)
        self._num_observed += 1
        if self._num_observed % PROFILE_RENEWED_EVERY == 0 or model not in self._profiles:
            self._profiles[model] = LengthProfile(lengths, mean)

    def expected(self, model: str, max_tokens: int | None = None) -> int:
        """Tokens that a request is expected to generate, at least 1."""
        expected = self._expected.get(model, DEFAULT_OUTPUT_TOKENS)
        if max_tokens is None or max_tokens >= expected:
            return expected
        return max_tokens if max_tokens > 0 else 1

    def profile(self, model: str) -> LengthProfile:
        """As of a few answers ago."""
        return self._profiles.get(model, UNKNOWN_LENGTHS)
