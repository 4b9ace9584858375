"""Which further endpoint should hold a hot prefix, ahead of need: a first request elsewhere would pay for the copy
alone, though all that follow gain by it, so as long as each goes where it is answered soonest nobody makes one.

Owns the rule. It must never send anything. A copy is made when

    hits_per_s * horizon_s / (holders + 1) * min(wait_s, compute_s)  >  compute_s + evict_s

    hits_per_s, horizon_s  as often, and for as long again, as it has been asked for; HORIZON_MAX_S at most
    1 / (holders + 1)      of these requests will find the copy, instead of the others' queues
    wait_s                 what a hit cost at the holders beyond itself, in the mean of the last seconds
                           (recent_load.py); more than computing it elsewhere nobody pays anyway
    compute_s              all its tokens at that endpoint's rate
    evict_s                cached blocks that go for it, as far as they would be asked for again (cost.py)

and only on an endpoint that is spare: idle now, and busy for SPARE_BUSY_MAX of the last seconds at most; its cores
too, where others compute on them (recent_load.py). The share is judgement: near saturation (live, 85 %) copies on
endpoints that were idle for an instant cost hits and waits, and there every worker is busy most of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.routing.cost import DEFAULT_PREFILL_TOKENS_PER_S, EVICTED_REUSE_RATIO
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.hot_prefixes import HotPrefix
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.recent_load import RecentLoad, num_active

TOKENS_MIN = 512             # less is computed soon enough when somebody asks
HITS_MIN = 3
RECENT_S = 10.0              # asked for no longer ago
HORIZON_MAX_S = 60.0
SPARE_BUSY_MAX = 0.25
POOL_SHARE_MAX = 0.5         # of an endpoint's memory that one prefix may take; what goes for it is in evict_s
AVAILABLE_SHARE_MIN = 0.5    # of it that must be free, or cached and in no use


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everybody who serves the model, what is booked there, and how the last seconds were."""

    views: Sequence[EndpointView]
    loads: Mapping[str, LoadView]
    recent: RecentLoad


def is_worth_copies(prefix: HotPrefix, now: float) -> bool:
    """Whether it is asked for often enough, and long enough."""
    return prefix.num_tokens >= TOKENS_MIN and prefix.num_hits >= HITS_MIN and now - prefix.last_at <= RECENT_S


def next_holder(prefix: HotPrefix, holders: Collection[str], fleet: Fleet, now: float, *,
                passed_over: Collection[str] = ()) -> str | None:
    """The endpoint that should compute it too, none of `passed_over`; None while that would help nobody."""
    waits = [recent.wait_s for view in fleet.views if view.endpoint_id in holders
             and (recent := fleet.recent.of(view.endpoint_id)) is not None]
    if not waits:
        return None
    spare = [view for view in fleet.views if view.endpoint_id not in holders
             and view.endpoint_id not in passed_over and _is_spare(view, fleet) and _has_room(view, prefix)]
    if not spare:
        return None
    best = max(spare, key=lambda view: (view.blocks_free, view.prefill_tokens_per_s))
    hits = expected_hits(prefix, now) / (len(waits) + 1)
    compute_s = prefix.num_tokens * _token_s(best)
    saved_s = hits * min(sum(waits) / len(waits), compute_s)
    return best.endpoint_id if saved_s > compute_s + _evict_s(best, prefix) else None


def expected_hits(prefix: HotPrefix, now: float) -> float:
    """To come within the horizon: as many as in as long a time before, if it was as often asked for all the time."""
    age_s = now - prefix.first_at
    return prefix.num_hits * min(1.0, HORIZON_MAX_S / age_s) if age_s > 0 else float(prefix.num_hits)


def _is_spare(view: EndpointView, fleet: Fleet) -> bool:
    recent = fleet.recent.of(view.endpoint_id)
    return (recent is not None and recent.busy_share <= SPARE_BUSY_MAX
            and not num_active(view, fleet.loads.get(view.endpoint_id, NO_LOAD)))


def _has_room(view: EndpointView, prefix: HotPrefix) -> bool:
    return (view.ready and not view.draining and view.knowledge is Knowledge.EXACT
            and view.block_size == prefix.block_size
            and len(prefix.chain) <= POOL_SHARE_MAX * view.blocks_total
            and view.blocks_free + view.blocks_cached >= AVAILABLE_SHARE_MIN * view.blocks_total)


def _token_s(view: EndpointView) -> float:
    return 1.0 / (view.prefill_tokens_per_s if view.prefill_tokens_per_s > 0 else DEFAULT_PREFILL_TOKENS_PER_S)


def _evict_s(view: EndpointView, prefix: HotPrefix) -> float:
    num_evicted = max(0, len(prefix.chain) - view.blocks_free)
    return EVICTED_REUSE_RATIO * num_evicted * view.block_size * _token_s(view)
