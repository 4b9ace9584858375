"""How much of an endpoint's work comes from elsewhere: other gateways, which nobody tells us of but its reports.

Owns two running means of one endpoint. What others send between two reports is not seen, so the larger their share,
the less is known of what a new request would meet there.
"""

from __future__ import annotations

NEWEST_WEIGHT = 0.2   # of a report, so ten seconds of reports count
LEAST_REQUESTS = 0.5  # a request now and then is not yet a habit


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
