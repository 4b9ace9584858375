"""For large fleets: the few endpoints that can win a pick, found with numpy; the real picker prices only those.

Owns a table of the figures that cost.py reads, one row an endpoint. Its estimate of a cost is cost.py's formula on
vectors without the wait for memory, so never above it; whoever's estimate is within reach of the true cost of the one
estimated lowest goes to gateway.routing.picker.pick, which decides. Tests hold the decision equal to that over the
whole fleet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from gateway.routing import cost
from gateway.routing.busy_steps import FIXED_STREAMS, BusySteps
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.picker import PickInput, reach_s
from gateway.routing.prefix_index import NO_MATCH

# Wider than the picker's ties by more than the estimate's rounding.
SLACK_RATIO = 1e-6
ENDPOINTS_MIN = 64   # where it is worth it
UNSEEN = -1.0        # in place of a share, which is never below zero


class Shortlist:
    """Rows in the order of the endpoints; update() whenever a view or a load changed, or `steps` saw something."""

    def __init__(self, views: Sequence[EndpointView], loads: Mapping[str, LoadView], steps: BusySteps) -> None:
        self._steps = steps
        self._row = {view.endpoint_id: row for row, view in enumerate(views)}
        count = len(views)
        self._token_s, self._step_s = np.zeros(count), np.zeros(count)
        self._queued, self._active, self._context = np.zeros(count), np.zeros(count), np.zeros(count)
        self._free, self._available = np.zeros(count), np.zeros(count)
        self._pool, self._batch, self._share = np.zeros(count), np.zeros(count), np.zeros(count)
        self._block_size = views[0].block_size
        for view in views:
            self.update(view, loads.get(view.endpoint_id, NO_LOAD))

    def update(self, view: EndpointView, load: LoadView) -> None:
        row = self._row[view.endpoint_id]
        self._token_s[row] = 1 / view.prefill_tokens_per_s if view.prefill_tokens_per_s > 0 else 0.0
        self._step_s[row] = view.decode_step_s
        self._queued[row] = max(load.queued_prefill_tokens, view.waiting_prefill_tokens + view.running_prefill_tokens)
        self._active[row] = max(load.num_inflight, view.num_running + view.num_waiting)
        self._context[row] = max(load.decode_context_tokens, view.decode_context_tokens)
        self._free[row] = view.blocks_free * view.block_size - load.held_tokens + view.held_tokens_at_report
        self._available[row] = self._free[row] + view.blocks_cached * view.block_size
        self._pool[row] = view.blocks_total * view.block_size
        self._batch[row] = view.step_tokens or cost.BATCH_TOKENS
        share = self._steps.share_of(view.endpoint_id)
        self._share[row] = UNSEEN if share is None else share

    def narrow(self, given: PickInput) -> Sequence[EndpointView]:
        """The endpoints among which pick() chooses as it would among all. Those without rates of their own come with
        what pick() would have assumed of them, since it is no longer shown all their peers."""
        rates = None if self._token_s.all() and self._step_s.all() else cost.assumed_rates(given.endpoints)
        estimate = self._estimate(given, rates)
        roomy = np.where(self._is_short(given), np.inf, estimate)   # whose estimate leaves no wait for memory out
        reach = min(self._reach_s(given, int(row), rates) for row in {estimate.argmin(), roomy.argmin()})
        near = [given.endpoints[row] for row in np.flatnonzero(estimate <= reach).tolist()]
        return near if rates is None else [_with_rates(view, rates) for view in near]

    def _reach_s(self, given: PickInput, row: int, rates: cost.Rates | None) -> float:
        """What the picker will say of this one: nobody whose estimate is above that can win."""
        view = given.endpoints[row]
        priced = cost.candidate_cost(view, (given.matches or {}).get(view.endpoint_id, NO_MATCH),
                                     given.loads.get(view.endpoint_id, NO_LOAD), given.work(),
                                     rates=rates or cost.Rates())
        return reach_s(priced, given.unseen_requests) + SLACK_RATIO * (abs(priced.total_s) + 1)

    def _estimate(self, given: PickInput, rates: cost.Rates | None) -> np.ndarray:
        prompt, output = given.prompt_tokens, given.expected_output_tokens
        token_s, step_s = self._token_s, self._step_s
        if rates is not None:
            token_s = np.where(token_s == 0, 1 / rates.prefill_tokens_per_s, token_s)
            step_s = np.where(step_s == 0, rates.decode_step_s, step_s)
        matched = np.zeros(len(self._row))
        for endpoint_id, match in (given.matches or {}).items():
            held = (match.confirmed_blocks + match.speculative_blocks) * self._block_size
            matched[self._row[endpoint_id]] = min(held, prompt - 1)
        uncached = prompt - matched
        prefill = uncached * token_s * (1 + (matched + prompt) / (2 * cost.ATTENTION_DOUBLING_TOKENS))
        stream = np.maximum(cost.stream_step_share(prompt) * step_s, token_s)
        slowed = self._active + self._context / cost.ATTENTION_DOUBLING_TOKENS
        others = cost.STREAM_WEIGHT * output * stream * slowed + cost.STALL_WEIGHT * self._active * prefill
        steps = np.where(self._active > 0, (cost.STEP_UNDER_WAY + (self._queued + uncached) / self._batch)
                         * self._busy_step_s(step_s), 0.0)
        evicted = np.maximum(uncached + output - np.maximum(self._free, 0), 0)
        evict = np.where(self._pool > 0, cost.EVICTED_REUSE_RATIO * evicted * token_s, 0.0)
        total: np.ndarray = prefill + self._queued * token_s + steps + others + evict
        return total

    def _busy_step_s(self, step_s: np.ndarray) -> np.ndarray:
        """What first tokens tell of the steps at each endpoint; `step_s` where they tell nothing."""
        busy = np.where(self._share == UNSEEN, self._steps.share_of_all, self._share) * (self._active + FIXED_STREAMS)
        return np.where(busy > 0, busy, step_s)

    def _is_short(self, given: PickInput) -> np.ndarray:
        kept = (cost.ROOM_KEPT_RATIO + cost.ROOM_DOUBT_RATIO) * self._pool
        return (self._pool > 0) & (given.prompt_tokens + kept > self._available)


def _with_rates(view: EndpointView, rates: cost.Rates) -> EndpointView:
    return replace(view, prefill_tokens_per_s=view.prefill_tokens_per_s or rates.prefill_tokens_per_s,
                   decode_step_s=view.decode_step_s or rates.decode_step_s)
