"""How much of an endpoint's work comes from elsewhere: other gateways, which nobody tells us of but its reports.

Owns two running means of one endpoint, and how often to look where others send work: what they send between two
reports is not seen, so the larger their share, the less is known of what a new request would meet there.
"""

from __future__ import annotations

NEWEST_WEIGHT = 0.2   # of a report, so ten seconds of reports count
LEAST_REQUESTS = 0.5  # a request now and then is not yet a habit
SHARED_MIN = 0.2      # so much of an endpoint's work is no accident of when its report was made
SHARED_LOOKS = 4      # in place of one
# A look is taken to cost 0.4 ms: looks at many endpoints are spaced so that all take a fiftieth of a core.
LOOK_SHARE_S = 0.02


class OthersShare:
    """`ratio`: 0 when all work there is ours, to nearly 1."""

    __slots__ = ("_others", "_own")

    def __init__(self) -> None:
        self._own = self._others = 0.0

    def saw(self, own: int, reported: int) -> None:
        """A report counts so many requests, and so many are in our ledger now."""
        self._own += NEWEST_WEIGHT * (min(own, reported) - self._own)
        self._others += NEWEST_WEIGHT * (max(0, reported - own) - self._others)

    @property
    def ratio(self) -> float:
        return self._others / (self._own + self._others + LEAST_REQUESTS)


def look_again_after_s(usual_s: float, ratio: float, num_endpoints: int) -> float:
    """From one look at an endpoint of so many to the next, where `ratio` of its work is others'."""
    if ratio < SHARED_MIN:
        return usual_s
    return min(usual_s, max(usual_s / SHARED_LOOKS, LOOK_SHARE_S * num_endpoints))
