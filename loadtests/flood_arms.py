"""What a tenant got in one kind of phase, and two kinds side by side: quantiles, their ratio, how sure that is.

Owns the arithmetic. Requests that come shortly one after the other wait for the same thing, so what is drawn again to
say how sure a ratio is are stretches of WINDOW_S, the same ones of every arm: their arrivals are alike.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from loadtests.open_loop import Answered

WINDOW_S = 3.25
NUM_DRAWS = 1000
Window = tuple[int, int]


def quantile(times: Iterable[float], share: float) -> float:
    """The smallest of `times` that is not below this share of them; there is one at least."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Arm:
    """All its phases. `windows`: the seconds to first tokens, by round and stretch of the phase."""

    windows: dict[Window, list[float]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    late_s: list[float] = field(default_factory=list)
    num_broken: int = 0

    def add(self, round_number: int, answers: Sequence[Answered], *, num_broken: int) -> None:
        """One phase's answers."""
        self.num_broken += num_broken
        for answer in answers:
            self.statuses[str(answer.status)] += 1
            self.late_s.append(answer.late_s)
            if answer.status == 200:
                window = round_number, int(answer.due_s / WINDOW_S)
                self.windows.setdefault(window, []).append(answer.first_byte_s)

    @property
    def ttfts_s(self) -> list[float]:
        """Of every answer."""
        return _flat(self.windows, self.windows)

    def summary(self) -> dict[str, object]:
        """As JSON. `sent_late_p99_s`: by how much our own client missed the instant; it is in the times."""
        return {"answers": dict(self.statuses), "broken": self.num_broken,
                **{f"ttft_p{percent}_s": round(quantile(self.ttfts_s, percent / 100), 4) for percent in (50, 90, 99)},
                "sent_late_p99_s": round(quantile(self.late_s, 0.99), 4)}


@dataclass(frozen=True)
class Ratio:
    """A quantile of one arm over that of others, and where 95 % of the draws lie."""

    value: float
    low: float
    high: float

    def summary(self) -> dict[str, float]:
        """As JSON."""
        return {"ratio": round(self.value, 3), "low": round(self.low, 3), "high": round(self.high, 3)}

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(of: Arm, over: Sequence[Arm], share: float, *, seed: int) -> Ratio:
    """That quantile of `of`, over the same of the other arms together."""
    chance, windows = random.Random(seed), sorted(of.windows)
    draws = sorted(_ratio(of, over, share, chance.choices(windows, k=len(windows))) for _ in range(NUM_DRAWS))
    return Ratio(_ratio(of, over, share, windows), quantile(draws, 0.025), quantile(draws, 0.975))


def _ratio(of: Arm, over: Sequence[Arm], share: float, windows: Sequence[Window]) -> float:
    together = [time for arm in over for time in _flat(arm.windows, windows)]
    return quantile(_flat(of.windows, windows), share) / quantile(together, share)


def _flat(times: Mapping[Window, list[float]], windows: Iterable[Window]) -> list[float]:
    return [time for window in windows for time in times.get(window, ())]
