"""The cheapest endpoint in the usual case, in one pass: a small fleet in which nothing is out of the ordinary.

Owns no formula: it reckons what cost.py does, in the same order, so its figures are the same to the last bit, and it
gives up (None) where a term comes in that only cost.py knows: a session's bonus, a slower tier, short memory, other
gateways, shared cores, rates that nobody reported. What does not depend on the request, an endpoint's standing, is
kept for as long as view and load are the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from gateway.routing.cost import (
    ATTENTION_DOUBLING_TOKENS,
    BATCH_TOKENS,
    EVICTED_REUSE_RATIO,
    PRICE_MAX_S,
    ROOM_DOUBT_RATIO,
    ROOM_KEPT_RATIO,
    STALL_WEIGHT,
    STEP_UNDER_WAY,
    STREAM_WEIGHT,
    TIE_RATIO,
    TIE_S,
    CandidateCost,
    stream_step_share,
)
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.prefix_index import NO_MATCH, Match

if TYPE_CHECKING:
    from gateway.routing.picker import PickInput

# Above, it is cheaper to find by least costs who is worth pricing.
FEW_MAX = 12
STANDINGS_MAX = 4096
_NO_MATCHES: Mapping[str, Match] = {}
_TWICE_DOUBLING = 2 * ATTENTION_DOUBLING_TOKENS
_new_tuple = tuple.__new__


class Standing(NamedTuple):
    """An endpoint's part of a cost. `weight` is what a token of ours lengthens there, in streams; `margin_tokens`
    must stay free beyond what is needed."""

    view: EndpointView
    load: LoadView
    may_serve: bool
    max_context: int
    block_size: int
    is_usual: bool
    token_s: float
    queued: int
    queue_s: float
    num_active: int
    step_s: float
    step_tokens: int
    weight: float
    stall: float
    has_pool: int
    margin_tokens: float
    available_tokens: int
    free_tokens: int
    price_s: float


# The one to choose, its cost, the longest match of all in tokens, and everybody who was considered.
Cheapest = tuple[EndpointView, CandidateCost, int, list[EndpointView]]


class Standings:
    """Those of the endpoints seen last, by id; any may be forgotten at any time."""

    __slots__ = ("by_id",)

    def __init__(self) -> None:
        self.by_id: dict[str, Standing] = {}

    def renew(self, view: EndpointView, load: LoadView) -> Standing:
        """The standing of this view under this load."""
        if len(self.by_id) >= STANDINGS_MAX:
            self.by_id.clear()
        standing = self.by_id[view.endpoint_id] = standing_of(view, load)
        return standing


def standing_of(view: EndpointView, load: LoadView) -> Standing:
    """As candidate_cost() finds them, and like it with comparisons in place of max(): it runs once a booking."""
    num_active, queued, context, _, held_tokens = load
    rate, step_s, block_size = view.prefill_tokens_per_s, view.decode_step_s, view.block_size
    is_usual = rate > 0 and step_s > 0 and not view.others_ratio
    token_s = 1.0 / rate if is_usual else 1.0
    reported = view.waiting_prefill_tokens + view.running_prefill_tokens
    queued = queued if queued > reported else reported
    reported = view.num_running + view.num_waiting
    num_active = num_active if num_active > reported else reported
    reported = view.decode_context_tokens
    context = context if context > reported else reported
    free = view.blocks_free * block_size - held_tokens + view.held_tokens_at_report
    return _new_tuple(Standing, (
        view, load, view.ready and not view.draining, view.max_context, block_size, is_usual, token_s, queued,
        queued * token_s, num_active, step_s, view.step_tokens or BATCH_TOKENS,
        num_active + context / ATTENTION_DOUBLING_TOKENS, STALL_WEIGHT * num_active, view.blocks_total,
        (ROOM_KEPT_RATIO + ROOM_DOUBT_RATIO) * (view.blocks_total * block_size),
        free + view.blocks_cached * block_size, free if free > 0 else 0,
        min(max(view.price_s, 0.0), PRICE_MAX_S) if view.price_s else 0.0))


def cheapest(given: PickInput, standings: Standings) -> Cheapest | None:
    """What pick() would choose; None where something is unusual, or nobody may serve it."""
    if (given.session_endpoint_id is not None or given.crowding or given.unseen_requests
            or len(given.endpoints) > FEW_MAX):
        return None
    model, context_tokens, excluded = given.model, given.context_tokens, given.excluded
    matches, loads, by_id = given.matches or _NO_MATCHES, given.loads, standings.by_id
    prompt, output, busy_step_of = given.prompt_tokens, given.expected_output_tokens, given.busy_step_of
    stream_share = stream_step_share(prompt)
    views, rows = [], []
    most, reach = 0, math.inf
    for view in given.endpoints:
        endpoint_id = view.endpoint_id
        load, standing = loads.get(endpoint_id, NO_LOAD), by_id.get(endpoint_id)
        if standing is None or standing[0] is not view or standing[1] is not load:
            standing = standings.renew(view, load)
        (_, _, may_serve, max_context, block_size, is_usual, token_s, queued, queue_s, num_active, step_s,
         step_tokens, weight, stall, has_pool, margin, available, free, price_s) = standing
        if (not may_serve or (model is not None and model not in view.models)
                or 0 < max_context < context_tokens or endpoint_id in excluded):
            continue
        confirmed, speculative, slow = matches.get(endpoint_id, NO_MATCH)
        if slow or not is_usual:
            return None
        views.append(view)
        matched = (confirmed + speculative) * block_size
        if matched >= prompt:
            matched = prompt - 1 if prompt else 0
        if matched > most:
            most = matched
        uncached = prompt - matched or 1
        prefill_s = uncached * token_s * (1.0 + (matched + prompt) / _TWICE_DOUBLING)
        if prefill_s + queue_s > reach:   # more than that it costs in any case
            continue
        steps_s = num_steps = evict_s = 0.0
        if num_active:
            num_steps = STEP_UNDER_WAY + (queued + uncached) / step_tokens
            steps_s = num_steps * (busy_step_of(endpoint_id, num_active) or step_s)
        stream_step_s = stream_share * step_s
        others_s = (STREAM_WEIGHT * output * (stream_step_s if stream_step_s > token_s else token_s) * weight
                    + stall * prefill_s)
        if has_pool:
            if uncached + matched + margin > available and (num_active or available <= 0):
                return None
            if uncached + output > free:
                evict_s = EVICTED_REUSE_RATIO * (uncached + output - free) * token_s
        total_s = prefill_s + queue_s + steps_s + others_s + evict_s + price_s
        if total_s > reach:
            continue
        if (bound := total_s + TIE_RATIO * total_s + TIE_S) < reach:
            reach = bound
        rows.append((total_s, uncached, view, (
            endpoint_id, total_s, prefill_s, queue_s, steps_s, 0.0, 0.0, others_s, evict_s, price_s, 0.0, matched,
            uncached, queued, num_active, num_steps, 0.0, 0.0)))
    if not rows:
        return None
    if len(rows) > 1:
        rows = [row for row in rows if row[0] <= reach]
        if len(rows) > 1:
            least = min([row[1] for row in rows])
            rows = [row for row in rows if row[1] == least]
    _, _, view, cost = rows[int(given.random_ratio * len(rows))]
    return view, _new_tuple(CandidateCost, cost), most, views
