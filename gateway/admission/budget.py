"""A tenant's budget: so many tokens in each hour, day, week or month, by the calendar of UTC.

Owns: where a window begins and ends, and what is left in it. Must never: know the clock. Instants are seconds since
1970.

Prompt tokens are taken before a request goes on, generated ones when it has ended, so a window may end overspent by
what was under way. The next begins full. A prompt larger than the whole budget passes when nothing has been spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

HOUR_S, DAY_S = 3600.0, 86400.0
DAYS_OF_ERA, DAYS_TO_1970 = 146_097, 719_468
MONDAY_AT_DAY = 4  # 1970 began on a Thursday


class Window(StrEnum):
    """How long a budget is for. A week begins on Monday, a month on its first day."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Budget:
    """`tokens` of prompts and answers together."""

    tokens: float
    window: Window = Window.DAY


class BudgetState(NamedTuple):
    """What has been spent in the window that began at `began_at`. A window that began at 0 was never used."""

    began_at: float
    spent: float


UNSPENT = BudgetState(0.0, 0.0)


class BudgetMeter:
    """One tenant's spending. Its `state` may be kept elsewhere between two calls."""

    __slots__ = ("_budget", "state")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.state = UNSPENT

    def wait_s(self, amount: float, wall_s: float) -> float:
        """Seconds until `amount` may be taken; 0 when it may be taken now."""
        spent = self._spent(wall_s)
        if spent < self._budget.tokens and (not spent or spent + amount <= self._budget.tokens):
            return 0.0
        return window_end(self._budget.window, wall_s) - wall_s

    def take(self, amount: float, wall_s: float) -> None:
        """Spend it, beyond the budget if need be."""
        self.state = BudgetState(window_begin(self._budget.window, wall_s), self._spent(wall_s) + amount)

    def left(self, wall_s: float) -> float:
        """Tokens of this window that are not spent."""
        return max(0.0, self._budget.tokens - self._spent(wall_s))

    def _spent(self, wall_s: float) -> float:
        return self.state.spent if self.state.began_at >= window_begin(self._budget.window, wall_s) else 0.0


def window_begin(window: Window, wall_s: float) -> float:
    """When the window that holds this instant began."""
    day = int(wall_s // DAY_S)
    match window:
        case Window.HOUR:
            return wall_s // HOUR_S * HOUR_S
        case Window.DAY:
            return day * DAY_S
        case Window.WEEK:
            return (day - (day - MONDAY_AT_DAY) % 7) * DAY_S
        case Window.MONTH:
            year, month, _ = _date_of(day)
            return _day_of(year, month) * DAY_S


def window_end(window: Window, wall_s: float) -> float:
    """When the next window begins."""
    begin = window_begin(window, wall_s)
    if window is not Window.MONTH:
        return begin + {Window.HOUR: HOUR_S, Window.DAY: DAY_S, Window.WEEK: 7 * DAY_S}[window]
    year, month, _ = _date_of(int(begin // DAY_S))
    return _day_of(year + month // 12, month % 12 + 1) * DAY_S


def _date_of(day: int) -> tuple[int, int, int]:
    """Year, month and day of a day since 1970. Years begin in March here, so that the leap day is the last."""
    era, of_era = divmod(day + DAYS_TO_1970, DAYS_OF_ERA)
    year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    return (400 * era + year + (month >= 10), month + 3 if month < 10 else month - 9,
            of_year - (153 * month + 2) // 5 + 1)


def _day_of(year: int, month: int) -> int:
    """The first day of a month, in days since 1970."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5
    return era * DAYS_OF_ERA + 365 * of_era + of_era // 4 - of_era // 100 + of_year - DAYS_TO_1970
