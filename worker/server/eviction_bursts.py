"""Evictions added up into bursts for the log. Pure.

A full pool is a cache's normal state, and then every sequence evicts a block each time it fills one: a line per step
would drown the log. So blocks are added up per request that needed the room, and told when that request ends or
BURST_S after its first, whichever comes first. Holds one entry per request at work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BURST_S = 1.0

OnBurst = Callable[[str | None, int], None]


@dataclass(slots=True)
class _Burst:
    began_at: float
    num_blocks: int = 0


class EvictionBursts:
    """`add` after each step, `ended` when a request is released; `on_burst(request_id, num_blocks)` tells."""

    def __init__(self, on_burst: OnBurst) -> None:
        self._bursts: dict[str, _Burst] = {}
        self._on_burst = on_burst

    def add(self, request_id: str | None, num_blocks: int, now: float) -> None:
        """A step gave up `num_blocks` idle blocks for this request (None: for nobody in particular, told at once)."""
        if num_blocks and request_id is None:
            self._on_burst(None, num_blocks)
        elif num_blocks and request_id is not None:
            self._bursts.setdefault(request_id, _Burst(now)).num_blocks += num_blocks
        for due in [key for key, burst in self._bursts.items() if now - burst.began_at >= BURST_S]:
            self.ended(due)

    def ended(self, request_id: str) -> None:
        """Tell what has been added up for a request, if anything."""
        burst = self._bursts.pop(request_id, None)
        if burst is not None:
            self._on_burst(request_id, burst.num_blocks)
