"""How long answers are expected to be."""

from __future__ import annotations

from gateway.routing.output_length import DEFAULT_OUTPUT_TOKENS, MODELS_MAX, OutputLength


def test_the_mean_follows_what_is_observed_and_max_tokens_bounds_it() -> None:
    lengths = OutputLength()
    assert lengths.expected("m") == DEFAULT_OUTPUT_TOKENS
    for _ in range(200):
        lengths.observe("m", 1000)
    assert 990 <= lengths.expected("m") <= 1000
    assert lengths.expected("m", 50) == 50
    assert lengths.expected("m", 0) == 1
    assert lengths.expected("n") == DEFAULT_OUTPUT_TOKENS
    for _ in range(200):
        lengths.observe("m", 0)
    assert lengths.expected("m") == 1


def test_models_beyond_the_bound_are_not_learned() -> None:
    lengths = OutputLength()
    for number in range(MODELS_MAX + 10):
        lengths.observe(f"m{number}", 100_000)
    assert lengths.expected("m0") > DEFAULT_OUTPUT_TOKENS
    assert lengths.expected(f"m{MODELS_MAX}") == DEFAULT_OUTPUT_TOKENS
