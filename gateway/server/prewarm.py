"""Hot prefixes for operators: which there are, and having one computed on another worker ahead of need.

Owns: GET /admin/cache and POST /admin/prewarm behind ops.py's token. Must never: show a token or a salt.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from gateway import errors
from gateway.knowledge.endpoint_table import Endpoint, EndpointState
from gateway.knowledge.engines.headstart import (
    HeadstartWorker,
    Prewarmed,
    WorkerNotReady,
    WorkerNotUnderstood,
    WorkerUnreachable,
)
from gateway.relay.upstream import Upstream
from gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from gateway.server.state import GatewayState
from gateway.shared.notes import Notes, SharedBet
from worker.prompt.json_body import decode_body
from worker.protocol.api_error import ApiError, invalid_request

SHOWN_MAX = 100
PREWARMS_MAX = 8


class PrewarmBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /admin/prewarm. `hash` as GET /admin/cache shows it; without `worker` the least busy one that
    does not hold the prefix."""

    hash: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    worker: str | None = None


_decoder = msgspec.json.Decoder(PrewarmBody)


class Prewarmer:
    """Lives on the event loop."""

    def __init__(self, state: GatewayState, hot: HotPrefixes, upstream: Upstream,
                 notes: Notes | None = None) -> None:
        self._table = state.table
        self._index = state.index
        self._ledger = state.ledger
        self._worker_token = state.config.worker_token
        self._bet_ttl_s = state.config.speculative_ttl_s
        self._hot = hot
        self._upstream = upstream
        self._notes = notes
        self._num_running = 0

    def cache(self) -> list[dict[str, Any]]:
        """The hottest prefixes that this process has seen, by hash, and who holds them whole."""
        now = time.monotonic()
        return [{"hash": f"{key:016x}", "model": prefix.model, "tokens": prefix.num_tokens, "hits": prefix.num_hits,
                 "score": round(prefix.score_at(now), 3), "last_hit_s": round(now - prefix.last_at, 3),
                 "workers": self.holders(prefix, now)} for key, prefix in self._hot.hottest(SHOWN_MAX, now)]

    async def prewarm(self, raw: bytes) -> dict[str, Any]:
        """Compute one prefix on one worker; returns when it is there."""
        body = decode_body(raw, _decoder).value
        prefix = self._prefix(body.hash)
        endpoint = self._endpoint(prefix, body.worker)
        if endpoint is None:
            return {"hash": body.hash, "worker": None, "detail": "every ready worker of this model holds it"}
        done = await self.compute(prefix, endpoint)
        return {"hash": body.hash, "worker": endpoint.endpoint_id, "tokens": prefix.num_tokens,
                "cached_tokens": done.cached_tokens}

    async def compute(self, prefix: HotPrefix, endpoint: Endpoint) -> Prewarmed:
        """Have it computed there, booked and bet on as a request's prompt is; returns when it is there. ApiError when
        it is not."""
        if self._num_running >= PREWARMS_MAX:
            raise ApiError(429, "queue_full", f"{PREWARMS_MAX} prewarms are under way.", headers={"Retry-After": "1"})
        now = time.monotonic()
        bet = self._index.speculate(endpoint.endpoint_id, prefix.chain, now)
        bet.hold(self._bet_ttl_s)
        if self._notes is not None and endpoint.epoch is not None:
            self._notes.tell_bet(SharedBet(endpoint.endpoint_id, endpoint.epoch, now + self._bet_ttl_s, prefix.chain))
        self._num_running += 1
        try:
            with self._ledger.book(endpoint.endpoint_id, endpoint.epoch or "", prefill_tokens=prefix.num_tokens,
                                   context_tokens=prefix.num_tokens):
                return await HeadstartWorker(self._upstream, endpoint.worker, self._worker_token).prewarm(
                    prefix.token_ids(), prefix.salt, prefix.salt_from)
        except (WorkerNotReady, WorkerNotUnderstood, WorkerUnreachable) as why:
            self._index.withdraw(bet)
            raise ApiError(502, "worker_failed", f"{endpoint.endpoint_id} did not prewarm: {why}") from why
        finally:
            bet.settle(time.monotonic())
            self._num_running -= 1

    def _prefix(self, text: str) -> HotPrefix:
        try:
            prefix = self._hot.get(int(text, 16))
        except ValueError:
            raise invalid_request("hash should be hex digits, as GET /admin/cache shows them.", "hash") from None
        if prefix is None:
            raise ApiError(404, "prefix_not_found", "No hot prefix has this hash (any more); see GET /admin/cache.",
                           param="hash")
        return prefix

    def _endpoint(self, prefix: HotPrefix, worker_id: str | None) -> Endpoint | None:
        serving = [endpoint for endpoint in self._table.serving(prefix.model)
                   if endpoint.state is EndpointState.READY and endpoint.scheme is not None
                   and endpoint.scheme.block_size == prefix.block_size]
        if worker_id is not None:
            for endpoint in serving:
                if endpoint.endpoint_id == worker_id:
                    return endpoint
            raise ApiError(404, "worker_not_found", f"There is no ready worker {worker_id[:200]!r} of this model; "
                           "see /admin/workers.", param="worker")
        if not serving:
            raise errors.no_worker("No worker of this model is ready.")
        holders = self.holders(prefix, time.monotonic())
        others = [endpoint for endpoint in serving if endpoint.endpoint_id not in holders]
        return min(others, key=lambda endpoint: self._ledger.load(endpoint.endpoint_id).num_inflight, default=None)

    def holders(self, prefix: HotPrefix, now: float, *, on_the_way: bool = False) -> list[str]:
        """The endpoints that hold it whole, or, if `on_the_way`, are expected to soon."""
        return [endpoint_id for endpoint_id, match in self._index.match(prefix.chain, now).items()
                if match.confirmed_blocks + on_the_way * match.speculative_blocks >= len(prefix.chain)]
