"""What prefill costs on this machine: measured at start, corrected as steps go.

Owns the way from a target inter-token latency to the pace the scheduler keeps. Computes nothing for a user, reads no
clock: durations come in. Known approximation: a step's time beyond that of the usual decode step is its prefill's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from worker.core.prefill_pace import TOKENS_MIN, PrefillPace

# What is aimed at, so that a step that takes a little longer than most stays within the target too.
AIM_RATIO = 0.65
# Positions before the chunk of the second measurement; fewer where the context is shorter.
DEEP_CONTEXT_TOKENS = 2048
# One slow step weighs more than one fast one: a target missed is worse than a chunk too small.
RISING_WEIGHT, FALLING_WEIGHT = 0.5, 0.1
CORRECTION_MIN, CORRECTION_MAX = 0.5, 16.0

# Seconds to compute positions [start, stop) of one sequence.
MeasureStep = Callable[[range], float]


def measure_pace(measure: MeasureStep, *, target_s: float, tokens_max: int, context_max: int) -> PrefillPace:
    """Chunks of about the size that the target will allow, at the beginning of a prompt and deep inside one."""
    num_tokens = min(tokens_max, 8 * TOKENS_MIN)
    for _ in range(2):      # the second time at the size that the first one suggests
        step_s = max(1e-9, measure(range(num_tokens)))
        token_s = step_s / num_tokens
        num_tokens = max(1, min(tokens_max, max(TOKENS_MIN, int(AIM_RATIO * target_s / token_s))))
    pace = PrefillPace(AIM_RATIO * target_s, token_s)
    depth = min(DEEP_CONTEXT_TOKENS, context_max - num_tokens)
    if depth < num_tokens:
        return pace
    deep_s = measure(range(depth, depth + num_tokens))
    return replace(pace, context_s=max(0.0, (deep_s / num_tokens - token_s) / depth))


class Pacer:
    """The pace as measured at start, times how wrong it was lately."""

    def __init__(self, measured: PrefillPace) -> None:
        self._measured = measured
        self.correction = 1.0

    @property
    def pace(self) -> PrefillPace:
        return replace(self._measured, token_s=self._measured.token_s * self.correction,
                       context_s=self._measured.context_s * self.correction)

    def observe(self, *, chunks: list[tuple[int, int]], prefill_s: float) -> None:
        """A step computed these (start, number of positions), which added `prefill_s` to the decoding in it."""
        if sum(num_tokens for _, num_tokens in chunks) < TOKENS_MIN:
            return
        expected_s = sum(self._measured.seconds(start, num_tokens) for start, num_tokens in chunks)
        found = min(CORRECTION_MAX, max(CORRECTION_MIN, prefill_s / expected_s))
        weight = RISING_WEIGHT if found > self.correction else FALLING_WEIGHT
        self.correction += weight * (found - self.correction)
