"""How much of an endpoint's work comes from elsewhere: other gateways, which nobody tells us of but its reports.

Owns two running means of one endpoint, and how often to look where others send work: what they send between two
reports is not seen, so the larger their share, the less is known of what a new request would meet there.
"""

from __future__ import annotations

import math

MEAN_OVER_S = 4.5     # after so long a report counts e times less, however often one looks
FIRST_AFTER_S = 1.0   # the first one counts as if it came so long after another
LEAST_REQUESTS = 0.5  # a request now and then is not yet a habit
SHARED_MIN = 0.2      # so much of an endpoint's work is no accident of when its report was made
SHARED_LOOKS = 10     # in place of one
# A look costs 0.2 ms: looks at many endpoints are spaced so that all take a fiftieth of a core.
LOOK_SHARE_S = 0.01


class OthersShare:
    """`ratio`: 0 when all work there is ours, to nearly 1. Instants are of any one monotonic clock."""

    __slots__ = ("_others", "_own", "_seen_at")

    def __init__(self) -> None:
        self._own = self._others = 0.0
        self._seen_at: float | None = None

    def saw(self, own: int, reported: int, now: float) -> None:
        """A report counts so many requests, and so many are in our ledger now."""
        passed_s = FIRST_AFTER_S if self._seen_at is None else now - self._seen_at
        weight = -math.expm1(-passed_s / MEAN_OVER_S)
        self._seen_at = now
        self._own += weight * (min(own, reported) - self._own)
        self._others += weight * (max(0, reported - own) - self._others)

    @property
    def ratio(self) -> float:
        return self._others / (self._own + self._others + LEAST_REQUESTS)


def look_again_after_s(usual_s: float, ratio: float, num_endpoints: int) -> float:
    """From one look at an endpoint of so many to the next, where `ratio` of its work is others'."""
    if ratio < SHARED_MIN:
        return usual_s
    return min(usual_s, max(usual_s / SHARED_LOOKS, LOOK_SHARE_S * num_endpoints))
