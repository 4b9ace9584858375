"""What loading a token's K/V from an endpoint's slower tier takes, against computing it, as first tokens tell.

Owns what was seen of it. It must never read a clock. Until something was seen, and again STALE_S after, it is what is
usual (cost.SLOW_TIER_RATIO): an endpoint whose tier seemed slow is passed over for it, and so has to be tried again.

What a first token took beyond the computing, the queue and the steps that were expected is taken for the loading. An
observation counts for the less, the less of the wait the loading can be, and not at all where it spared little
computing. It is taken to be off by CHANGE_MAX at most: a stray one does little, a slow disk shows within a few.
"""

from __future__ import annotations

from gateway.routing.busy_steps import NEWEST_WEIGHT, WHOLE_SHARE, moved
from gateway.routing.cost import SLOW_TIER_RATIO, CandidateCost

SPARED_S_MIN = 0.02    # less measures the way there
RATIO_MIN, RATIO_MAX = 0.01, 30.0
STALE_S = 600.0


class TierRatios:
    """By endpoint; `forget` when one goes. Instants are of any one monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}   # the ratio, and when it was seen last

    def ratio(self, endpoint_id: str, *, now: float) -> float:
        """Seconds of loading for a second of computing."""
        ratio, seen_at = self._seen.get(endpoint_id, (SLOW_TIER_RATIO, now))
        return ratio if now - seen_at <= STALE_S else SLOW_TIER_RATIO

    def saw(self, expected: CandidateCost, first_token_s: float, *, now: float) -> None:
        """A first token took so long, where `expected` was reckoned and all that was to be loaded was found."""
        spared_s = expected.spared_s
        if spared_s < SPARED_S_MIN or expected.room_s:   # waiting for memory says nothing about loading
            return
        others_s = expected.prefill_s + expected.queue_s + expected.steps_s
        weight = NEWEST_WEIGHT * min(1.0, spared_s / (spared_s + others_s) / WHOLE_SHARE)
        before = self.ratio(expected.endpoint_id, now=now)
        ratio = moved(before, (first_token_s - others_s) / spared_s, weight)
        self._seen[expected.endpoint_id] = min(max(ratio, RATIO_MIN), RATIO_MAX), now

    def forget(self, endpoint_id: str) -> None:
        """Another process answers there now."""
        self._seen.pop(endpoint_id, None)
