"""How much prefill a step may hold while others decode: a bound in seconds, turned into positions.

Owns the arithmetic from a target inter-token latency to a number of positions. Measures nothing: what a position
costs was found at start, and comes in as a value. Known approximation: the cost of a position is linear in what lies
before it, and adds to that of the decoding rows.
"""

from __future__ import annotations

from dataclasses import dataclass

# A prefill that is under way gets this many positions a step, whatever the target: a bound on how long it can take.
TOKENS_MIN = 16


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """`target_s` is what prefill may add to the gap between two tokens of a decoding sequence.

    A position costs `token_s`, and `context_s` more for each position before it.
    """

    target_s: float
    token_s: float
    context_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.target_s > 0, "a target is more than nothing"
        assert self.token_s > 0, "computing a position takes time"
        assert self.context_s >= 0, "no context makes a position cheaper"

    def seconds(self, start: int, num_tokens: int) -> float:
        """What computing positions [start, start + num_tokens) costs."""
        return num_tokens * (self.token_s + self.context_s * (start + num_tokens / 2))

    def tokens_within(self, seconds: float, start: int) -> int:
        """How many positions from `start` on fit into `seconds`, a few less where the context makes them dearer."""
        num_tokens = int(seconds / (self.token_s + self.context_s * start))
        while num_tokens > 0 and self.seconds(start, num_tokens) > seconds:
            num_tokens = int(num_tokens * seconds / self.seconds(start, num_tokens))
        return max(0, num_tokens)
