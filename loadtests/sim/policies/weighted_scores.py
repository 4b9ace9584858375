"""llm-d's scheduler: scores in [0, 1] per endpoint, summed with the weights prefix : queue : KV usage = 2 : 2 : 1.

As published: prefix = matched share of the prompt by exact events; queue = (max - q) / (max - min) over the waiting
requests that the endpoints report, 1 when all are equal; kv = 1 - usage. The highest sum wins, ties by chance.
Speculative entries bridge the lag of events for 2 s.
"""

from __future__ import annotations

from gateway.routing.cost import matched_tokens
from gateway.routing.picker import PickInput
from gateway.routing.prefix_index import NO_MATCH
from loadtests.sim.policies.routing_policy import RoutingPolicy, best_by_chance
from loadtests.sim.sim_request import SimRequest


class WeightedScores(RoutingPolicy):
    """No state."""

    name = "llm_d"
    uses_index = True
    speculative_ttl_s = 2.0

    def __init__(self, *, prefix: float = 2.0, queue: float = 2.0, kv: float = 1.0) -> None:
        self._prefix, self._queue, self._kv = prefix, queue, kv

    def position(self, given: PickInput, request: SimRequest) -> int:
        waiting = [view.num_waiting for view in given.endpoints]
        most, least = max(waiting), min(waiting)
        matches = given.matches or {}
        scores = []
        for view in given.endpoints:
            matched = matched_tokens(view, matches.get(view.endpoint_id, NO_MATCH), given.prompt_tokens)
            queue = (most - view.num_waiting) / (most - least) if most > least else 1.0
            scores.append(self._prefix * matched / max(1, given.prompt_tokens) + self._queue * queue
                          + self._kv * (1 - view.kv_usage_ratio))
        return best_by_chance(scores, given.random_ratio)
