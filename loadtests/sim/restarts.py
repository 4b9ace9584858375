"""A restart storm: in the middle of the trace every worker is replaced by a cold one, one after the other.

Owns when. What a restart does is the cluster's: the cache is empty, requests under way begin again, and gateways
learn of the new epoch at once, as from a broken connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtests.sim.cluster import Cluster

BEGINS_AT = 0.5     # of the trace's span
LASTS = 0.1


def schedule_storm(cluster: Cluster) -> None:
    """Put the restarts on the clock."""
    span_s = cluster.requests[-1].arrives_at if cluster.requests else 0.0
    for number in range(len(cluster.workers)):
        share = BEGINS_AT + LASTS * number / len(cluster.workers)
        cluster.clock.at(share * span_s, _restart(cluster, number))


def _restart(cluster: Cluster, number: int) -> Callable[[], None]:
    return lambda: cluster.restart(number)
