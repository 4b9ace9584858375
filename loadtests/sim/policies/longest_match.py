"""Longest match without load, as production-stack's prefixaware routing has it.

As published: a trie of what was routed where, never forgotten; the endpoints at the deepest match, one of them by
chance; any endpoint by chance when nothing matches. There is no load term.

Known approximation: whole blocks instead of chunks of 128 characters.
"""

from __future__ import annotations

from gateway.routing.picker import PickInput
from loadtests.sim.policies.routing_policy import RoutingPolicy
from loadtests.sim.sim_request import SimRequest


class LongestMatch(RoutingPolicy):
    """State: who was sent which prefix."""

    name = "longest_match"

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}

    def position(self, given: PickInput, request: SimRequest) -> int:
        here = {view.endpoint_id: position for position, view in enumerate(given.endpoints)}
        matched = set(here)
        for block_hash in request.hashes:
            holders = self._holders.get(block_hash, set()) & here.keys()
            if not holders:
                break
            matched = holders
        positions = sorted(here[name] for name in matched)
        return positions[int(given.random_ratio * len(positions))]

    def booked(self, request: SimRequest, worker_id: str) -> None:
        for block_hash in request.hashes:
            self._holders.setdefault(block_hash, set()).add(worker_id)
