"""What other gateways may have sent since workers last reported, and a choice that stands beside theirs.

Owns what is known of their requests: how many come for one of ours, by the reports, and how often ours come. It must
never draw: a random number comes in.

What they send in that time nobody else sees. But they reckon as we do: whoever is cheapest to us is cheapest to
them, and when all go there it no longer is. So each chooses by chance, with the chances by which, if all do alike,
all that may be chosen come out equally dear and none of the others is cheaper: water poured over a ground of costs.

Known approximations: others' requests come when ours do, and are like the one that is decided; what room they take is
not in it (cost.py's doubt_s). Where several processes share a ledger, each counts what it books itself, so less is
expected than comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.routing.cost import CandidateCost
from gateway.routing.others_share import LEAST_REQUESTS, MEAN_OVER_S, SHARED_MIN

RATE_OVER_S = 1.0      # bursts are short
OWN_AT_FIRST = 5.0     # a single request that we do not know of is no habit of others
REQUESTS_MIN = 0.01    # fewer change no choice, and are divided by


class UnseenWork:
    """Of one gateway. Reports and bookings have a monotonic clock each."""

    __slots__ = ("_booked", "_booked_at", "_others", "_own", "_report_age_s", "_seen_at")

    def __init__(self) -> None:
        self._own = self._others = self._booked = 0.0
        self._seen_at = self._booked_at = -math.inf
        self._report_age_s = 0.0

    def saw(self, own: int, reported: int, now: float, *, next_after_s: float) -> None:
        """A report of some endpoint counts so many requests, and so many are in our ledger now; its next one comes
        after so long. An idle endpoint tells nothing of others."""
        self._report_age_s = next_after_s / 2
        if not own and not reported:
            return
        kept = math.exp((self._seen_at - now) / MEAN_OVER_S)
        self._seen_at = now
        self._own = kept * self._own + own
        self._others = kept * self._others + max(0, reported - own)

    def booked(self, now: float) -> None:
        """One more request of ours."""
        self._booked = 1.0 + self._booked * math.exp((self._booked_at - now) / RATE_OVER_S)
        self._booked_at = now

    @property
    def ratio(self) -> float:
        """The share of all endpoints' work that is others'. It stays as it was while nobody has work."""
        return self._others / (self._own + self._others + OWN_AT_FIRST)

    def requests(self, now: float) -> float:
        """How many of others have been sent since the reports, in the mean; 0 where there is nobody else."""
        if self.ratio < SHARED_MIN:
            return 0.0
        rate = self._booked * math.exp((self._booked_at - now) / RATE_OVER_S) / RATE_OVER_S
        requests = rate * self._report_age_s * self._others / (self._own + LEAST_REQUESTS)
        return requests if requests >= REQUESTS_MIN else 0.0


def width_s(cost: CandidateCost, unseen_requests: float) -> float:
    """What so many requests like ours would add to this cost, if all of them went there."""
    return unseen_requests * (cost.prefill_s + cost.others_s)


def spread(costs: Sequence[CandidateCost], unseen_requests: float, random_ratio: float) -> int:
    """Which of them to choose, where others choose as well."""
    order = sorted(range(len(costs)), key=lambda at: costs[at].total_s)
    widths = [width_s(cost, unseen_requests) for cost in costs]
    level, num_wet = _level([costs[at].total_s for at in order], [widths[at] for at in order])
    left = random_ratio
    for at in order[:num_wet]:
        left -= (level - costs[at].total_s) / widths[at]
        if left < 0:
            return at
    return order[num_wet - 1]


def _level(ground: Sequence[float], widths: Sequence[float]) -> tuple[float, int]:
    """How high the water stands over a rising ground, and how many places are under it."""
    capacity = filled = 0.0
    level = math.inf
    for number, (height, width) in enumerate(zip(ground, widths, strict=True)):
        if height >= level:
            return level, number
        capacity += 1.0 / width
        filled += height / width
        level = (1.0 + filled) / capacity
    return level, len(ground)
