"""Places at the workers of one model: how many requests hold one, and what waits for one elsewhere.

Owns: the count, and how many of them one tenant may hold. Must never: know a worker. gateway.shared has the same over
several processes.
"""

from __future__ import annotations

from typing import NamedTuple


class WaitingElsewhere(NamedTuple):
    """What waits in the other processes of this gateway, for the same model."""

    num_requests: int = 0
    num_bytes: int = 0


NOBODY_ELSEWHERE = WaitingElsewhere()


def may_hold_another(num_held: float, num_free: int, reserved_ratio: float) -> bool:
    """Whether a tenant that holds `num_held` places may take one of those that are free. Alone it leaves
    `reserved_ratio` of all free for others, two of them leave half of that, and so on; so whoever holds none finds
    one at once, and never waits for a whole answer of another's. Of a few places none is left."""
    return num_held * reserved_ratio < num_free * (1.0 - reserved_ratio)


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

    def num_free(self, limit: int) -> int:
        """Places that nobody holds."""
        return limit - self.num_holding

    def estimated(self, num_here: int) -> float:
        """How many places a tenant with so many in this process holds in all."""
        return num_here

    def waits_here(self, num_requests: int, num_bytes: int) -> None:
        """What waits in this process now."""

    def elsewhere(self) -> WaitingElsewhere:
        """What waits in the others."""
        return NOBODY_ELSEWHERE

    def next_turn(self, random_ratio: float) -> int | None:
        """Whose turn a free place is: another process, or None for this one."""
        return None
