"""How long answers are: a running mean of what requests generated, for requests that have not answered yet.

Owns one figure a model. Known approximation: every request of a model is expected to answer alike; its own
`max_tokens` still bounds it.
"""

from __future__ import annotations

DEFAULT_OUTPUT_TOKENS = 128
NEWEST_WEIGHT = 0.05
MODELS_MAX = 256


class OutputLength:
    """Mean output tokens by model; DEFAULT_OUTPUT_TOKENS until something was observed."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def observe(self, model: str, output_tokens: int) -> None:
        """A request of `model` ended well after so many tokens. Models beyond MODELS_MAX are not learned."""
        if model in self._mean or len(self._mean) < MODELS_MAX:
            mean = self._mean.get(model, float(DEFAULT_OUTPUT_TOKENS))
            self._mean[model] = mean + NEWEST_WEIGHT * (output_tokens - mean)

    def expected(self, model: str, max_tokens: int | None = None) -> int:
        """Tokens that a request is expected to generate, at least 1."""
        mean = max(1, round(self._mean.get(model, DEFAULT_OUTPUT_TOKENS)))
        return mean if max_tokens is None else min(mean, max(1, max_tokens))
