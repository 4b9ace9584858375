"""The picker: filter -> cost -> choose, explained.

Owns the decision and its vocabulary. It must never read an index, a ledger, a clock or a random source: matches,
loads and one random number come in as values, so the same input gives the same decision in the gateway, in the
simulator and in `/admin/explain`.

A hot prefix spreads by itself: each request booked on the holder adds to its queue and its streams, until computing
the prefix once more elsewhere is cheaper than waiting, and then there are two holders. No threshold over the whole
fleet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from gateway.routing.cost import (
    TIE_RATIO,
    TIE_S,
    BusyStepOf,
    CandidateCost,
    Rates,
    StreamsOf,
    TierRatioOf,
    Work,
    assumed_rates,
    candidate_cost,
    least_costs,
    nobody,
    unseen,
    usual_tier,
)
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.output_length import DEFAULT_OUTPUT_TOKENS, UNKNOWN_LENGTHS, LengthProfile
from gateway.routing.prefix_index import NO_MATCH, Match
from gateway.routing.room_floor import RoomFloors
from gateway.routing.shared_cores import Crowding
from gateway.routing.unseen_work import spread, width_s
from gateway.routing.usual_cost import Standings, cheapest

Reason = Literal["prefix", "load", "cold", "session", "retry", "degraded"]
Refusal = Literal["no_endpoints", "unknown_model", "not_ready", "draining", "excluded"]

# From so many on that wait for memory, floors for the rest are worth their while, if there are so many of these.
WAITING_MIN = 4
FLOORS_MIN = 12
_NO_NEED = Rates()
_NO_MATCHES: Mapping[str, Match] = {}


class PickInput(Struct, frozen=True, gc=False):
    """Everything a decision depends on. `matches` and `loads` are by endpoint id; an absent one has none.

    `matches` None: the prompt could not be hashed, so nothing is known about caches. `excluded` are endpoints that
    failed this request already. `context_tokens` is the longest prompt with what is to be generated (0: not known);
    endpoints whose context is too short for it are passed over, unless all are: then the longest says so.
    `turn` counts requests (round robin); `random_ratio` is uniform in [0, 1). `now`, `shared_ratio`, `stretch`,
    `streams_of`, `lengths`, `chain`, `busy_step_of`, `crowding` and `tier_ratio_of` are for cost.Work. `standings`
    changes nothing but the time that it takes: what is remembered of the endpoints, for the next decision too.
    `unseen_requests` of other gateways are expected to have been sent since the reports (unseen_work.py).
    """

    endpoints: Sequence[EndpointView]
    prompt_tokens: int
    matches: Mapping[str, Match] | None = None
    loads: Mapping[str, LoadView] = {}
    model: str | None = None
    expected_output_tokens: int = DEFAULT_OUTPUT_TOKENS
    excluded: frozenset[str] = frozenset()
    session_endpoint_id: str | None = None
    random_ratio: float = 0.0
    turn: int = 0
    context_tokens: int = 0
    now: float = 0.0
    shared_ratio: float = 1.0
    stretch: float = 1.0
    streams_of: StreamsOf = nobody
    lengths: LengthProfile = UNKNOWN_LENGTHS
    chain: Sequence[int] = ()
    busy_step_of: BusyStepOf = unseen
    crowding: Mapping[str, Crowding] = {}
    tier_ratio_of: TierRatioOf = usual_tier
    standings: Standings | None = None
    unseen_requests: float = 0.0

    def work(self) -> Work:
        """What the request needs."""
        return Work(self.prompt_tokens, self.expected_output_tokens, self.now, self.shared_ratio, self.stretch,
                    self.streams_of, self.lengths, self.chain, self.busy_step_of, self.crowding,
                    self.tier_ratio_of)


class RoutingDecision(Struct, gc=False):
    """Where to send the request, and why; nobody changes it. matched = confirmed + speculative tokens, at most
    prompt - 1.

    `uncached_tokens` is what to book as prefill, `cost` what it costs there (None from policies that compute none),
    `most_matched_tokens` the longest match of all that were considered.
    """

    endpoint_id: str
    epoch: str
    reason: Reason
    matched_tokens: int
    match_confirmed_tokens: int
    match_speculative_tokens: int
    uncached_tokens: int
    cost: CandidateCost | None = None
    most_matched_tokens: int = 0
    considered: tuple[PickInput, Sequence[EndpointView]] | None = None

    @property
    def candidates(self) -> tuple[CandidateCost, ...]:
        """The cost on every endpoint that was considered, in their order. Computed when asked for: to choose, few
        of them are needed."""
        return () if self.considered is None else tuple(candidate_costs(*self.considered))


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
    work = given.work()
    session, matches, loads = given.session_endpoint_id, given.matches or {}, given.loads
    return [candidate_cost(view, matches.get(view.endpoint_id, NO_MATCH), loads.get(view.endpoint_id, NO_LOAD), work,
                           rates=rates, in_session=view.endpoint_id == session) for view in views]


def pick(given: PickInput) -> RoutingDecision | NoEndpoint:
    """The cheapest endpoint in seconds of work; near ties go to the one with least to compute, then by chance. Where
    other gateways send unseen requests, by chance among those whom these may leave cheapest.

    Only those are priced in full whose least cost is within reach of the best; the choice is as if all were.
    """
    if given.standings is not None and (found := cheapest(given, given.standings)) is not None:
        view, cost, most, views = found
        confirmed = min(given.matches.get(view.endpoint_id, NO_MATCH)[0] * view.block_size,
                        cost.matched_tokens) if given.matches else 0
        return RoutingDecision(view.endpoint_id, view.epoch, _reason(given, view, cost, (), most=most),
                               cost.matched_tokens, confirmed, cost.matched_tokens - confirmed, cost.uncached_tokens,
                               cost, most, (given, views))
    return _pick_by_least_costs(given)


def _pick_by_least_costs(given: PickInput) -> RoutingDecision | NoEndpoint:
    views: list[EndpointView] | NoEndpoint = _usual(given)
    if not views:
        views = eligible(given)
    if isinstance(views, NoEndpoint):
        return views
    order, costs, most = _within_reach(given, views)
    index = 0 if len(costs) == 1 else _choose(costs, given)
    view, chosen = views[order[index]], costs[index]
    if chosen.session_s:
        costs = candidate_costs(given, views)  # the bonus reaches further than a tie
    decision = decide(given, view, _reason(given, view, chosen, costs, most=most))
    decision.cost, decision.most_matched_tokens, decision.considered = chosen, most, (given, views)
    return decision


def decide(given: PickInput, view: EndpointView, reason: Reason) -> RoutingDecision:
    """The decision for `view`, with its match in tokens."""
    match = given.matches.get(view.endpoint_id, NO_MATCH) if given.matches else NO_MATCH
    limit = max(0, given.prompt_tokens - 1)
    confirmed = min(match.confirmed_blocks * view.block_size, limit)
    matched = min((match.confirmed_blocks + match.speculative_blocks) * view.block_size, limit)
    return RoutingDecision(view.endpoint_id, view.epoch, reason, matched, confirmed, matched - confirmed,
                           max(1, given.prompt_tokens - matched), most_matched_tokens=matched)


def _usual(given: PickInput) -> list[EndpointView]:
    """As eligible(), in one go; empty when some filter leaves nobody, and then it says which."""
    model, tokens, excluded = given.model, given.context_tokens, given.excluded
    return [view for view in given.endpoints
            if view.ready and not view.draining and (model is None or model in view.models)
            and (view.max_context >= tokens or not view.max_context)
            and not (excluded and view.endpoint_id in excluded)]


def _within_reach(given: PickInput, views: Sequence[EndpointView]) -> tuple[list[int], list[CandidateCost], int]:
    """Positions of those of `views` that may be within a tie of the cheapest, their costs, and the longest match of
    all in tokens."""
    rates = _NO_NEED
    for view in views:
        if view.prefill_tokens_per_s <= 0 or view.decode_step_s <= 0:
            rates = assumed_rates(views)
            break
    matches, work = given.matches or _NO_MATCHES, given.work()
    least, most = least_costs(views, matches, given.loads, work, rates=rates, session=given.session_endpoint_id)
    pricing = _Pricing(given, views, rates, work)
    pricing.price_likely(least)
    order = sorted(pricing.priced)
    return order, [pricing.priced[at] for at in order], most


class _Pricing:
    """Of one pick: costs by position, and how much another may cost to be chosen beside the lowest of them."""

    def __init__(self, given: PickInput, views: Sequence[EndpointView], rates: Rates, work: Work) -> None:
        self.work = work
        self.matches = given.matches or _NO_MATCHES
        self.priced: dict[int, CandidateCost] = {}
        self._given, self._views, self._rates = given, views, rates
        self._reach = math.inf

    def price_likely(self, least: Sequence[float]) -> None:
        """All that may be within reach, by their least costs; by better floors, where many wait for memory."""
        likeliest = least.index(min(least))
        num_waiting = WAITING_MIN if self._price(likeliest).room_s else 0
        reach = self._reach
        rest = [at for at, least_s in enumerate(least) if least_s <= reach and at != likeliest]
        for number, at in enumerate(rest):
            if num_waiting >= WAITING_MIN and len(rest) - number >= FLOORS_MIN:
                self._price_by_floors(rest[number:])
                return
            if least[at] <= self._reach and self._price(at).room_s:
                num_waiting += 1

    def _price_by_floors(self, rest: list[int]) -> None:
        loads, matches = self._given.loads, self.matches
        floors = RoomFloors([(view, loads.get(view.endpoint_id, NO_LOAD), matches.get(view.endpoint_id, NO_MATCH))
                             for view in map(self._views.__getitem__, rest)], self.work, self._rates)
        self._price(rest[floors.likeliest()])
        near = self._near(floors, rest)
        while near:
            reach = self._reach
            self._price(near[0])
            near = near[1:] if self._reach == reach else self._near(floors, rest)

    def _near(self, floors: RoomFloors, rest: Sequence[int]) -> list[int]:
        return [rest[row] for row in floors.within(self._reach) if rest[row] not in self.priced]

    def _price(self, at: int) -> CandidateCost:
        given, view = self._given, self._views[at]
        endpoint_id = view.endpoint_id
        cost = self.priced[at] = candidate_cost(
            view, self.matches.get(endpoint_id, NO_MATCH), given.loads.get(endpoint_id, NO_LOAD), self.work,
            rates=self._rates, in_session=endpoint_id == given.session_endpoint_id)
        reach = reach_s(cost, given.unseen_requests)
        if reach < self._reach:
            self._reach = reach
        return cost


def reach_s(cost: CandidateCost, unseen_requests: float) -> float:
    """Whoever costs more is not chosen beside this one: so far goes a tie, or what others may send there unseen."""
    total_s = cost.total_s
    return total_s + (width_s(cost, unseen_requests) if unseen_requests else TIE_RATIO * abs(total_s) + TIE_S)


def _choose(costs: Sequence[CandidateCost], given: PickInput) -> int:
    random_ratio = given.random_ratio
    if given.unseen_requests:
        return spread(costs, given.unseen_requests, random_ratio)
    bound = min([reach_s(cost, 0.0) for cost in costs])
    tied = [index for index, cost in enumerate(costs) if cost.total_s <= bound]
    if len(tied) > 1:
        least = min([costs[index].uncached_tokens for index in tied])
        tied = [index for index in tied if costs[index].uncached_tokens == least]
    return tied[int(random_ratio * len(tied))]


def _reason(given: PickInput, view: EndpointView, chosen: CandidateCost, costs: Sequence[CandidateCost],
            *, most: int) -> Reason:
    if given.excluded:
        return "retry"
    if given.matches is None or view.knowledge is Knowledge.NONE:
        return "degraded"
    if chosen.session_s and any(cost.total_s <= chosen.total_s + chosen.session_s
                                for cost in costs if cost.endpoint_id != chosen.endpoint_id):
        return "session"
    if not most:
        return "cold"
    return "prefix" if chosen.matched_tokens == most else "load"
