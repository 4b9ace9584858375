"""Lanes: an engine may hold one logical block several times, once for each tier and group of layers, and says so.

Owns which bits of a count of references belong to which (tier, group), and which of them are fast.
"""

from __future__ import annotations

REFERENCES_MAX = 0xFFFF
LANES_MAX = 64
FAST_TIERS = frozenset(("gpu", "hbm", "device"))
ONE = 1   # one reference in the first lane
_FIRST = ("gpu", 0)
_BITS = 16


class Lanes:
    """`fast` masks the counts of fast tiers."""

    __slots__ = ("_shifts", "fast")

    def __init__(self) -> None:
        self._shifts: dict[tuple[str, int], int] = {_FIRST: 0}
        self.fast = REFERENCES_MAX

    def shift(self, tier: str, group: int) -> int:
        """How far up the lane's count is."""
        lane = (tier, group)
        shift = self._shifts.get(lane)
        if shift is None:
            shift = _BITS * min(len(self._shifts), LANES_MAX - 1)
            # Beyond the limit, which only nonsense reaches, lanes share the last counter.
            if len(self._shifts) < LANES_MAX:
                self._shifts[lane] = shift
                if tier in FAST_TIERS:
                    self.fast |= REFERENCES_MAX << shift
        return shift
