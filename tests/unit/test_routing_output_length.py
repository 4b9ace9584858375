"""How long answers are expected to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.output_length import (
    DEFAULT_OUTPUT_TOKENS,
    LENGTHS_FEW,
    MODELS_MAX,
    LengthProfile,
    OutputLength,
)


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


def test_what_is_left_is_the_mean_of_those_that_got_longer() -> None:
    profile = LengthProfile([10] * 45 + [100, 200, 300], 80.0)
    assert profile.left(0, 80) == (450 + 600) / 48
    assert profile.left(50, 80) == 200 - 50
    assert profile.left(150, 80) == 20, "too few were longer: a share of what was expected"
    assert profile.left(20, 50) == 30, "bounded by its own max_tokens"
    assert profile.left(49, 50) == 12.5


@pytest.mark.parametrize("few", [[], [10] * (LENGTHS_FEW - 1)])
@given(generated=st.floats(0, 5000))
def test_while_few_lengths_are_known_an_answer_that_goes_on_is_long(few: list[int], generated: float) -> None:
    profile = LengthProfile(few, 128)
    if not few or generated >= 10:
        assert profile.left(generated, 128) == max(128, generated)
    assert profile.left(generated, 50) == max(50 - generated, 12.5), "bounded by its own max_tokens"


def test_a_profile_follows_what_is_observed() -> None:
    lengths = OutputLength()
    assert lengths.profile("m").left(0, 128) == 128
    for _ in range(300):
        lengths.observe("m", 1000)
    assert lengths.profile("m").left(900, lengths.expected("m")) == 100
    assert lengths.profile("n").left(100, 128) == 128
