"""Places at the workers of one model: how many requests hold one, and what waits for one elsewhere.

Owns: the count. Must never: know a worker. gateway.shared has the same over several processes.
"""

from __future__ import annotations

from typing import NamedTuple


class WaitingElsewhere(NamedTuple):
    """What waits in the other processes of this gateway, for the same model."""

    num_requests: int = 0
    num_bytes: int = 0


NOBODY_ELSEWHERE = WaitingElsewhere()


class Places:
    """Of one process that is alone."""

    def __init__(self) -> None:
        self.num_holding = 0

    def take(self, limit: int) -> bool:
        """Take a place unless `limit` are taken."""
        if self.num_holding >= limit:
            return False
        self.num_holding += 1
        return True

    def give_back(self) -> None:
        """A place is free again."""
        assert self.num_holding > 0, "a place was given back twice"
        self.num_holding -= 1

    def waits_here(self, num_requests: int, num_bytes: int) -> None:
        """What waits in this process now."""

    def elsewhere(self) -> WaitingElsewhere:
        """What waits in the others."""
        return NOBODY_ELSEWHERE

    def next_turn(self, random_ratio: float) -> int | None:
        """Whose turn a free place is: another process, or None for this one."""
        return None
