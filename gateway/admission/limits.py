"""What one tenant may use: requests and tokens a minute, requests at a time, and a budget of tokens.

Owns: the buckets and counts of each tenant. Must never: know the clock, or take from one limit when another refuses.

A bucket holds one minute's worth and fills evenly. Prompt tokens are taken before a request goes on, generated ones
when it has ended, so a bucket may owe: then nothing passes until the debt is paid. A prompt larger than a whole
minute's worth passes when the bucket is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.admission.budget import UNSPENT, BudgetMeter, BudgetState
from gateway.admission.tenants import Tenant, TenantLimits

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0
METERS_MAX = 100_000


class Limit(StrEnum):
    """Which limit refused; a metric label."""

    REQUESTS = "request_rate"
    TOKENS = "token_rate"
    CONCURRENCY = "concurrency"
    BUDGET = "token_budget"


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Not now: which limit, and when it should let this request pass."""

    limit: Limit
    retry_after_s: float


class BucketState(NamedTuple):
    """A bucket as values: what was in it, and when."""

    level: float
    at: float


class MeterState(NamedTuple):
    """A meter as values, for processes that share it. A bucket that is not limited stays as it was."""

    requests: BucketState
    tokens: BucketState
    num_inside: int
    budget: BudgetState = UNSPENT


_FULL = BucketState(0.0, 0.0)
NEVER_USED = MeterState(_FULL, _FULL, 0)


class Bucket:
    """A minute's worth of something, filling evenly. Instants must not go backwards."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0 when it may be taken now."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing) / self.per_minute * MINUTE_S

    def take(self, amount: float, now: float) -> None:
        """Take it, into debt if need be."""
        self._level = self.level(now) - amount
        self._at = now

    def level(self, now: float) -> float:
        """What is in it; negative when it owes."""
        return min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE_S)

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and not used."""
        self._level = min(self.per_minute, self.level(now) + amount)
        self._at = now

    def advance(self, share: float, now: float) -> float:
        """Take this share of what is in it, in whole units."""
        amount = float(max(0, int(self.level(now) * share)))
        if amount:
            self.take(amount, now)
        return amount

    @property
    def state(self) -> BucketState:
        """See BucketState."""
        return BucketState(self._level, self._at)

    @state.setter
    def state(self, state: BucketState) -> None:
        self._level, self._at = state


class TenantMeter:
    """One tenant's use. `enter` and `leave` come in pairs; `leave` more often than `enter` is our bug."""

    __slots__ = ("_budget", "_limits", "_requests", "_tokens", "_wall_offset_s", "num_inside")

    def __init__(self, limits: TenantLimits, now: float, *, wall_offset_s: float = 0.0) -> None:
        self._limits = limits
        self._budget = None if limits.budget is None else BudgetMeter(limits.budget)
        self._wall_offset_s = wall_offset_s
        self._requests = None if limits.requests_per_minute is None else Bucket(limits.requests_per_minute, now)
        self._tokens = None if limits.tokens_per_minute is None else Bucket(limits.tokens_per_minute, now)
        self.num_inside = 0

    def enter(self, now: float) -> OverLimit | None:
        """One more request, unless that is too many at once, too many a minute, or tokens are owed."""
        most = self._limits.max_concurrent
        if most is not None and self.num_inside >= most:
            return OverLimit(Limit.CONCURRENCY, CONCURRENCY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(0.0, now)) > 0:
            return OverLimit(Limit.TOKENS, wait_s)
        if (spent := self._over_budget(0.0, now)) is not None:
            return spent
        if self._requests is not None:
            if (wait_s := self._requests.wait_s(1.0, now)) > 0:
                return OverLimit(Limit.REQUESTS, wait_s)
            self._requests.take(1.0, now)
        self.num_inside += 1
        return None

    def leave(self) -> None:
        """A request has ended."""
        assert self.num_inside > 0, "a request left that never entered"
        self.num_inside -= 1

    def take_prompt(self, num_tokens: int, now: float) -> OverLimit | None:
        """Take a prompt's tokens, all or none."""
        if self._tokens is None and self._budget is None:
            return None
        if self._tokens is not None and (wait_s := self._tokens.wait_s(num_tokens, now)) > 0:
            return OverLimit(Limit.TOKENS, wait_s)
        if (spent := self._over_budget(num_tokens, now)) is not None:
            return spent
        self.take_output(num_tokens, now)
        return None

    def take_output(self, num_tokens: int, now: float) -> None:
        """Take what was generated: it is done already, so the next request pays."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)
        if self._budget is not None:
            self._budget.take(num_tokens, now + self._wall_offset_s)

    def _over_budget(self, num_tokens: float, now: float) -> OverLimit | None:
        wait_s = 0.0 if self._budget is None else self._budget.wait_s(num_tokens, now + self._wall_offset_s)
        return OverLimit(Limit.BUDGET, wait_s) if wait_s > 0 else None

    def give_back(self, requests: float, tokens: float, now: float) -> None:
        """What advance() took and nobody used."""
        for bucket, amount in ((self._requests, requests), (self._tokens, tokens)):
            if bucket is not None and amount:
                bucket.give_back(amount, now)

    def advance(self, share: float, now: float) -> tuple[float, float]:
        """Requests and tokens to be used later without asking: this share of what the buckets hold."""
        requests, tokens = (0.0 if bucket is None else bucket.advance(share, now)
                            for bucket in (self._requests, self._tokens))
        return requests, tokens

    def state(self, kept: MeterState) -> MeterState:
        """What another meter needs to go on from here; `kept` for what this one does not limit."""
        return MeterState(kept.requests if self._requests is None else self._requests.state,
                          kept.tokens if self._tokens is None else self._tokens.state, self.num_inside,
                          kept.budget if self._budget is None else self._budget.state)

    def restore(self, state: MeterState) -> None:
        """Go on from there. A bucket at instant 0 was never used: it is full."""
        for bucket, known in ((self._requests, state.requests), (self._tokens, state.tokens)):
            if bucket is not None:
                bucket.state = known if known.at else BucketState(bucket.per_minute, 0.0)
        if self._budget is not None:
            self._budget.state = state.budget
        self.num_inside = state.num_inside


class Meters:
    """A meter for every tenant that asked. New limits apply to those inside as well.

    At `max_meters` those of tenants with nothing under way are dropped, and begin anew, full. `wall_offset_s` is what
    the time of day, in seconds since 1970, is ahead of the instants given.
    """

    def __init__(self, *, max_meters: int = METERS_MAX, wall_offset_s: float = 0.0) -> None:
        self._max_meters = max_meters
        self._wall_offset_s = wall_offset_s
        self._meters: dict[str, tuple[TenantLimits, TenantMeter]] = {}

    def of(self, tenant: Tenant, now: float) -> TenantMeter:
        """This tenant's meter. When its limits have changed the buckets begin anew, full; what is spent is spent."""
        limits, meter = self._meters.get(tenant.tenant_id, (None, None))
        if meter is None or (limits is not tenant.limits and limits != tenant.limits):
            before = None if meter is None else meter.state(NEVER_USED)
            meter = TenantMeter(tenant.limits, now, wall_offset_s=self._wall_offset_s)
            if before is not None:
                meter.restore(MeterState(_FULL, _FULL, before.num_inside, before.budget))
            if len(self._meters) >= self._max_meters:
                self._meters = {name: kept for name, kept in self._meters.items() if kept[1].num_inside}
            self._meters[tenant.tenant_id] = (tenant.limits, meter)
        return meter
