"""The picker: filter -> cost -> choose, explained.

Owns the decision and its vocabulary. It must never read an index, a ledger, a clock or a random source: matches,
loads and one random number come in as values, so the same input gives the same decision in the gateway, in the
simulator and in `/admin/explain`.

A hot prefix spreads by itself: each request booked on the holder adds to its queue and its streams, until computing
the prefix once more elsewhere is cheaper than waiting, and then there are two holders. No threshold over the whole
fleet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.routing.cost import CandidateCost, Work, assumed_rates, candidate_cost
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.output_length import DEFAULT_OUTPUT_TOKENS
from gateway.routing.prefix_index import NO_MATCH, Match

Reason = Literal["prefix", "load", "cold", "session", "retry", "degraded"]
Refusal = Literal["no_endpoints", "unknown_model", "not_ready", "draining", "excluded"]

# Costs this close are a tie: the figures are not better than that, and equal choices by many requests are a herd.
TIE_RATIO = 0.01
TIE_S = 1e-6


@dataclass(frozen=True, slots=True)
class PickInput:
    """Everything a decision depends on. `matches` and `loads` are by endpoint id; an absent one has none.

    `matches` None: the prompt could not be hashed, so nothing is known about caches. `excluded` are endpoints that
    failed this request already. `context_tokens` is the longest prompt with what is to be generated (0: not known);
    endpoints whose context is too short for it are passed over, unless all are: then the longest says so.
    `turn` counts requests (round robin); `random_ratio` is uniform in [0, 1). `now` and `shared_ratio` are for
    cost.Work.
    """

    endpoints: Sequence[EndpointView]
    prompt_tokens: int
    matches: Mapping[str, Match] | None = None
    loads: Mapping[str, LoadView] = field(default_factory=dict)
    model: str | None = None
    expected_output_tokens: int = DEFAULT_OUTPUT_TOKENS
    excluded: frozenset[str] = frozenset()
    session_endpoint_id: str | None = None
    random_ratio: float = 0.0
    turn: int = 0
    context_tokens: int = 0
    now: float = 0.0
    shared_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Where to send the request, and why. matched = confirmed + speculative tokens, at most prompt - 1.

    `uncached_tokens` is what to book as prefill. `candidates` has every endpoint that was considered, in their
    order; empty for policies that compute no cost.
    """

    endpoint_id: str
    epoch: str
    reason: Reason
    matched_tokens: int
    match_confirmed_tokens: int
    match_speculative_tokens: int
    uncached_tokens: int
    candidates: tuple[CandidateCost, ...] = ()


@dataclass(frozen=True, slots=True)
class NoEndpoint:
    """Nobody can serve this now; false, so that `if decision:` reads well."""

    reason: Refusal
    message: str

    def __bool__(self) -> bool:
        return False


def eligible(given: PickInput) -> list[EndpointView] | NoEndpoint:
    """Endpoints that may serve the request, in the order given; or the last filter that left none."""
    views = list(given.endpoints)
    if not views:
        return NoEndpoint("no_endpoints", "no worker is configured or known")
    if given.model is not None:
        model = given.model
        views = [view for view in views if model in view.models]
        if not views:
            return NoEndpoint("unknown_model", f"no worker serves the model {model!r}")
    ready = [view for view in views if view.ready]
    if not ready:
        return NoEndpoint("not_ready", "no worker that serves this model is ready")
    staying = [view for view in ready if not view.draining]
    if not staying:
        return NoEndpoint("draining", "every worker that serves this model is draining")
    untried = [view for view in _long_enough(staying, given.context_tokens) if view.endpoint_id not in given.excluded]
    return untried or NoEndpoint("excluded", "every worker that serves this model failed this request already")


def _long_enough(views: list[EndpointView], context_tokens: int) -> list[EndpointView]:
    fitting = [view for view in views if not view.max_context or view.max_context >= context_tokens]
    longest = max(view.max_context for view in views)
    return fitting or [view for view in views if view.max_context == longest]


def candidate_costs(given: PickInput, views: Sequence[EndpointView]) -> list[CandidateCost]:
    """The cost on each of `views`, in their order."""
    rates = assumed_rates(views)
    work = Work(given.prompt_tokens, given.expected_output_tokens, given.now, given.shared_ratio)
    session, matches, loads = given.session_endpoint_id, given.matches or {}, given.loads
    return [candidate_cost(view, matches.get(view.endpoint_id, NO_MATCH), loads.get(view.endpoint_id, NO_LOAD), work,
                           rates=rates, in_session=view.endpoint_id == session) for view in views]


def pick(given: PickInput) -> RoutingDecision | NoEndpoint:
    """The cheapest endpoint in seconds of work; near ties go to the one with least to compute, then by chance."""
    views = eligible(given)
    if isinstance(views, NoEndpoint):
        return views
    costs = candidate_costs(given, views)
    index = _choose(costs, given.random_ratio)
    return decide(given, views[index], _reason(given, views[index], costs[index], costs), tuple(costs))


def decide(given: PickInput, view: EndpointView, reason: Reason,
           candidates: tuple[CandidateCost, ...] = ()) -> RoutingDecision:
    """The decision for `view`, with its match in tokens."""
    match = given.matches.get(view.endpoint_id, NO_MATCH) if given.matches else NO_MATCH
    limit = max(0, given.prompt_tokens - 1)
    confirmed = min(match.confirmed_blocks * view.block_size, limit)
    matched = min((match.confirmed_blocks + match.speculative_blocks) * view.block_size, limit)
    return RoutingDecision(view.endpoint_id, view.epoch, reason, matched, confirmed, matched - confirmed,
                           max(1, given.prompt_tokens - matched), candidates)


def _choose(costs: Sequence[CandidateCost], random_ratio: float) -> int:
    best = min(cost.total_s for cost in costs)
    bound = best + TIE_RATIO * abs(best) + TIE_S
    tied = [index for index, cost in enumerate(costs) if cost.total_s <= bound]
    if len(tied) > 1:
        least = min(costs[index].uncached_tokens for index in tied)
        tied = [index for index in tied if costs[index].uncached_tokens == least]
    return tied[int(random_ratio * len(tied))]


def _reason(given: PickInput, view: EndpointView, chosen: CandidateCost, costs: Sequence[CandidateCost]) -> Reason:
    if given.excluded:
        return "retry"
    if given.matches is None or view.knowledge is Knowledge.NONE:
        return "degraded"
    if chosen.session_s and any(cost.total_s <= chosen.total_s + chosen.session_s
                                for cost in costs if cost is not chosen):
        return "session"
    most = max(cost.matched_tokens for cost in costs)
    if not most:
        return "cold"
    return "prefix" if chosen.matched_tokens == most else "load"
