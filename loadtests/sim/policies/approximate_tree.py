"""sglang's cache-aware policy: an approximate tree fed by the router's own routing, and a fleet-wide gate.

As published: a prompt that matches more than `cache_threshold` of itself goes to the worker with the longest match,
any other to the worker with the smallest tree. When the fleet is out of balance, max - min > `balance_abs` and
max > `balance_rel` * min of requests under way, the shortest queue gets it, whatever matches. Trees forget the least
recently used beyond `max_tree_tokens` each.

Known approximation: whole blocks instead of characters, ties by chance instead of by the tree's inner order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

from gateway.routing.picker import PickInput
from loadtests.sim.policies.routing_policy import RoutingPolicy, best_by_chance, num_inflight
from loadtests.sim.sim_request import SimRequest

MAX_TREE_TOKENS = (1 << 26) // 4   # 2^26 characters


class ApproximateTree(RoutingPolicy):
    """State: what was routed where."""

    name = "sglang"

    def __init__(self, *, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5,
                 max_tree_tokens: int = MAX_TREE_TOKENS) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._max_tree_tokens = max_tree_tokens
        self._trees: dict[str, OrderedDict[int, None]] = {}

    def position(self, given: PickInput, request: SimRequest) -> int:
        loads = num_inflight(given)
        trees = [self._trees.get(view.endpoint_id, OrderedDict()) for view in given.endpoints]
        if max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads):
            return best_by_chance([-load for load in loads], given.random_ratio)
        depths = [float(_depth(tree, request.hashes)) for tree in trees]
        if max(depths) * request.block_size > self._cache_threshold * request.prompt_tokens:
            return best_by_chance(depths, given.random_ratio)
        return best_by_chance([-len(tree) for tree in trees], given.random_ratio)

    def booked(self, request: SimRequest, worker_id: str) -> None:
        tree = self._trees.setdefault(worker_id, OrderedDict())
        for block_hash in reversed(request.hashes):   # heads last: tails are forgotten first
            tree[block_hash] = None
            tree.move_to_end(block_hash)
        while len(tree) * request.block_size > self._max_tree_tokens:
            tree.popitem(last=False)


def _depth(tree: OrderedDict[int, None], hashes: list[int]) -> int:
    return bisect_left(hashes, True, key=lambda block_hash: block_hash not in tree)
