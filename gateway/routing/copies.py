"""Which further endpoint should hold a hot prefix, ahead of need: a first request elsewhere would pay for the copy
alone, though all that follow gain by it, so as long as each goes where it is answered soonest nobody makes one.

Owns the rule. It must never send anything. Only an idle endpoint is given a copy, and only when those that hold the
prefix are busy: it costs nobody a wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.hot_prefixes import HotPrefix
from gateway.routing.load_ledger import NO_LOAD, LoadView

TOKENS_MIN = 512             # less is computed soon enough when somebody asks
HITS_MIN = 3
RECENT_S = 10.0              # asked for no longer ago
ACTIVE_MIN = 1.0             # requests at a holder, in the mean
POOL_SHARE_MAX = 0.125       # of an endpoint's memory that one prefix may take
AVAILABLE_SHARE_MIN = 0.5    # of it that must be free, or cached and in no use


def is_worth_copies(prefix: HotPrefix, now: float) -> bool:
    """Whether it is asked for often enough, and long enough."""
    return prefix.num_tokens >= TOKENS_MIN and prefix.num_hits >= HITS_MIN and now - prefix.last_at <= RECENT_S


def next_holder(prefix: HotPrefix, views: Sequence[EndpointView], holders: Collection[str],
                loads: Mapping[str, LoadView]) -> str | None:
    """The endpoint that should compute it too; None while that would help nobody."""
    busy = [num_active(view, loads) for view in views if view.endpoint_id in holders]
    if not busy or sum(busy) < ACTIVE_MIN * len(busy):
        return None
    idle = [view for view in views if view.endpoint_id not in holders and not num_active(view, loads)
            and _has_room(view, prefix)]
    return max(idle, key=lambda view: view.blocks_free).endpoint_id if idle else None


def num_active(view: EndpointView, loads: Mapping[str, LoadView]) -> int:
    """Requests there, of ours or anybody's."""
    return max(loads.get(view.endpoint_id, NO_LOAD).num_inflight, view.num_running + view.num_waiting)


def _has_room(view: EndpointView, prefix: HotPrefix) -> bool:
    return (view.ready and not view.draining and view.knowledge is Knowledge.EXACT
            and view.block_size == prefix.block_size
            and len(prefix.chain) <= POOL_SHARE_MAX * view.blocks_total
            and view.blocks_free + view.blocks_cached >= AVAILABLE_SHARE_MIN * view.blocks_total)
