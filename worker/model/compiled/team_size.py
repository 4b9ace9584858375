"""How many threads decode together: all, or half of them for a while, where all are kept waiting and half are faster.

Pure: what steps took comes from outside. A step is in vain when its threads looked for each other again and again for
longer than their shares can differ: somebody else works on the cores, and two of them may be left on one.
"""

from __future__ import annotations

FIRST_TURN, TURN_MAX = 8, 512   # steps that half of them do, twice as many after each time that all are in vain again
PATIENCE = 512                  # steps for which nothing is tried, once half of them were no faster


class TeamSize:
    """`now` is the next step's. One that has one thread alone stays so."""

    def __init__(self, whole: int) -> None:
        self.now = whole
        self._whole = whole
        self._turn = self._left = self._patience = 0
        self._half_s: float | None = None   # the fastest step of the last turn

    def took(self, seconds: float, in_vain: bool) -> None:
        """That is what the step of `now` threads took."""
        if self.now < self._whole:
            self._half_s = seconds if self._half_s is None else min(self._half_s, seconds)
            self._left -= 1
            if self._left == 0:
                self.now = self._whole
        elif not in_vain:
            self._turn, self._half_s = 0, None
            self._patience = max(0, self._patience - 1)
        elif self._patience > 0:
            self._patience -= 1
        elif self._half_s is not None and self._half_s >= seconds:
            self._turn, self._half_s, self._patience = 0, None, PATIENCE
        else:
            self._turn = self._left = min(TURN_MAX, 2 * self._turn or FIRST_TURN)
            self.now, self._half_s = self._whole // 2, None
