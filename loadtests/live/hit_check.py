"""Does the hit that a worker reports lie where the gateway predicted it, in [confirmed, confirmed + speculative]?

Owns the comparison, of the gateway's own log lines. Off by no more than a block counts as within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests.live.driver import Outcome
from loadtests.live.fronts import Front
from loadtests.live.waiting import until

EXAMPLES_MAX = 20
SHOWN = ("request_id", "worker", "reason", "prompt_tokens", "confirmed_tokens", "matched_tokens", "cached_tokens",
         "ttft_ms", "retries", "at")


@dataclass(slots=True)
class HitCheck:
    """Requests compared, those exactly in the range, those within a block of it, and some that are not."""

    compared: int = 0
    exact: int = 0
    within: int = 0
    too_much: int = 0
    too_little: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def note(self, line: dict[str, Any], block_size: int) -> None:
        """One request's log line."""
        low, high, cached = (line[key] for key in ("confirmed_tokens", "matched_tokens", "cached_tokens"))
        error = max(0, low - cached) or min(0, high - cached)
        self.compared += 1
        self.exact += error == 0
        self.within += abs(error) <= block_size
        self.too_much += error > block_size
        self.too_little += error < -block_size
        if abs(error) > block_size and len(self.examples) < EXAMPLES_MAX:
            self.examples.append({key: line[key] for key in SHOWN if key in line})

    def add(self, other: HitCheck) -> None:
        """Another run's."""
        self.compared += other.compared
        self.exact += other.exact
        self.within += other.within
        self.too_much += other.too_much
        self.too_little += other.too_little
        self.examples = (self.examples + other.examples)[:EXAMPLES_MAX]

    def as_dict(self) -> dict[str, Any]:
        return {"compared": self.compared, "exact": self.exact, "within": self.within,
                "within_ratio": self.within / self.compared if self.compared else None, "too_much": self.too_much,
                "too_little": self.too_little, "examples": self.examples}


async def checked(front: Front, outcomes: Sequence[Outcome], block_size: int) -> HitCheck:
    """Of the requests that were answered. Lines are written a little after the answer, so they are waited for."""
    wanted = {outcome.request_id for outcome in outcomes if outcome.answer is not None}

    async def all_written() -> bool:
        return wanted <= {line["request_id"] for line in front.request_lines()}

    await until(all_written, "a log line for every request")
    check = HitCheck()
    for line in front.request_lines():
        if line["request_id"] in wanted and {"confirmed_tokens", "matched_tokens", "cached_tokens"} <= line.keys():
            check.note(line, block_size)
    return check
