"""Consistent hashing with bounded load, as KubeAI has it.

As published: hash the prompt's first 100 characters onto a ring with 256 places an endpoint, walk on from there, and
take the first endpoint whose requests under way are at most `load_factor` (1.25) times the mean with this request
added; when none is, the endpoint where the walk began.

Known approximation: the first block stands for the first 100 characters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from gateway.routing.endpoint import EndpointView
from gateway.routing.picker import PickInput
from loadtests.sim.policies.routing_policy import RoutingPolicy, num_inflight
from loadtests.sim.sim_request import SimRequest


class BoundedHash(RoutingPolicy):
    """State: the ring, made again when the endpoints change."""

    name = "consistent_hash"

    def __init__(self, *, load_factor: float = 1.25, places: int = 256) -> None:
        self._load_factor = load_factor
        self._places = places
        self._names: list[str] = []
        self._ring: list[tuple[int, int]] = []

    def position(self, given: PickInput, request: SimRequest) -> int:
        self._follow(given.endpoints)
        loads = num_inflight(given)
        bound = self._load_factor * (sum(loads) + 1) / len(loads)
        key = request.hashes[0] if request.hashes else request.index
        start = bisect_right(self._ring, (key, len(loads)))
        first: int | None = None
        for step in range(len(self._ring)):
            position = self._ring[(start + step) % len(self._ring)][1]
            first = position if first is None else first
            if loads[position] <= bound:
                return position
        assert first is not None, "the ring is empty"
        return first

    def _follow(self, endpoints: Sequence[EndpointView]) -> None:
        names = [view.endpoint_id for view in endpoints]
        if names == self._names:
            return
        self._names = names
        self._ring = sorted((xxh3_64_intdigest(f"{name}/{place}".encode()), position)
                            for position, name in enumerate(names) for place in range(self._places))
