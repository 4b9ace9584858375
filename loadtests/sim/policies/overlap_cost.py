"""Dynamo's KV router: the least prefill to come plus decode blocks, in blocks.

As published: cost = w * max(active prefill tokens + prompt tokens - overlap credit, 0) / block size + decode blocks,
with w = 1, active sums as the router itself has booked them (prefill until the first token, blocks until the end,
this request's included), overlap by exact events, ties by chance, temperature 0. Predicted entries live 5 s.

Known approximation: a block that two active requests share counts twice.
"""

from __future__ import annotations

from collections import defaultdict

from gateway.routing.cost import matched_tokens
from gateway.routing.picker import PickInput
from gateway.routing.prefix_index import NO_MATCH
from loadtests.sim.policies.routing_policy import RoutingPolicy, best_by_chance
from loadtests.sim.sim_request import SimRequest


class OverlapCost(RoutingPolicy):
    """State: active prefill tokens and blocks of each endpoint."""

    name = "dynamo"
    uses_index = True

    def __init__(self, *, weight: float = 1.0) -> None:
        self._weight = weight
        self._prefill: defaultdict[str, int] = defaultdict(int)
        self._blocks: defaultdict[str, int] = defaultdict(int)
        self._pending: dict[int, int] = {}
        self._matched: dict[str, int] = {}

    def position(self, given: PickInput, request: SimRequest) -> int:
        matches = given.matches or {}
        own_blocks = -(-given.prompt_tokens // request.block_size)
        costs = []
        for view in given.endpoints:
            name = view.endpoint_id
            matched = self._matched[name] = matched_tokens(view, matches.get(name, NO_MATCH), given.prompt_tokens)
            prefill = max(self._prefill[name] + given.prompt_tokens - matched, 0)
            costs.append(-(self._weight * prefill / request.block_size + self._blocks[name] + own_blocks))
        return best_by_chance(costs, given.random_ratio)

    def booked(self, request: SimRequest, worker_id: str) -> None:
        uncached = self._pending[request.index] = request.prompt_tokens - self._matched[worker_id]
        self._prefill[worker_id] += uncached
        self._blocks[worker_id] += -(-request.prompt_tokens // request.block_size)

    def prefill_done(self, request: SimRequest, worker_id: str) -> None:
        self._prefill[worker_id] -= self._pending.pop(request.index, 0)

    def ended(self, request: SimRequest, worker_id: str) -> None:
        self.prefill_done(request, worker_id)
        self._blocks[worker_id] -= -(-request.prompt_tokens // request.block_size)
