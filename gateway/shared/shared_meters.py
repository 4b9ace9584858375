"""Tenants' limits over all processes of a gateway: admission.limits on values that lie in shared memory.

Owns: the buckets' words (written under the segment's lock) and this process's count of requests inside (its own row).
A tenant without limits is counted without the lock. New limits apply to what the buckets hold already: what is above
a new maximum is lost, and a higher one fills in its own time.
"""

from __future__ import annotations

from typing import Protocol

from gateway.admission.limits import METERS_MAX, BucketState, Meters, MeterState, OverLimit, TenantMeter
from gateway.admission.tenants import Tenant, TenantLimits
from gateway.shared.row_table import RowTable
from gateway.shared.segment import BUCKET_WORDS, Segment

INSIDE = 0


class Meter(Protocol):
    """What admission asks of a tenant's meter; TenantMeter is one."""

    def enter(self, now: float) -> OverLimit | None: ...
    def leave(self) -> None: ...
    def take_prompt(self, num_tokens: int, now: float) -> OverLimit | None: ...
    def take_output(self, num_tokens: int, now: float) -> None: ...


class SharedMeter:
    """One tenant's meter. Instants are time.monotonic(), which all processes of a machine share."""

    def __init__(self, limits: TenantLimits, segment: Segment, table: RowTable, column: int) -> None:
        self._segment = segment
        self._table = table
        self._column = column
        self._at = segment.layout.buckets_at + column * BUCKET_WORDS
        self._meter = TenantMeter(limits, 0.0)
        self._has_buckets = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        self._is_limited = self._has_buckets or limits.max_concurrent is not None

    @property
    def num_inside(self) -> int:
        """Requests of this tenant under way in any process."""
        return self._table.total(self._column, INSIDE)

    def enter(self, now: float) -> OverLimit | None:
        """See TenantMeter."""
        if not self._is_limited:
            self._table.add(self._column, INSIDE, 1)
            return None
        with self._segment.locked():
            before = self._load()
            if (over := self._meter.enter(now)) is None:
                self._store(before)
                self._table.add(self._column, INSIDE, 1)
        return over

    def leave(self) -> None:
        """See TenantMeter."""
        assert self._table.words[self._table.own(self._column, INSIDE)] > 0, "a request left that never entered"
        self._table.add(self._column, INSIDE, -1)

    def take_prompt(self, num_tokens: int, now: float) -> OverLimit | None:
        """See TenantMeter."""
        if not self._has_buckets:
            return None
        with self._segment.locked():
            before = self._load()
            if (over := self._meter.take_prompt(num_tokens, now)) is None:
                self._store(before)
        return over

    def take_output(self, num_tokens: int, now: float) -> None:
        """See TenantMeter."""
        if self._has_buckets:
            with self._segment.locked():
                before = self._load()
                self._meter.take_output(num_tokens, now)
                self._store(before)

    def _load(self) -> MeterState:
        at, reals = self._at, self._segment.reals
        state = MeterState(BucketState(reals[at], reals[at + 1]), BucketState(reals[at + 2], reals[at + 3]),
                           self.num_inside)
        self._meter.restore(state)
        return state

    def _store(self, before: MeterState) -> None:
        requests, tokens, _ = self._meter.state(before)
        at, reals = self._at, self._segment.reals
        reals[at], reals[at + 1], reals[at + 2], reals[at + 3] = *requests, *tokens


class SharedMeters:
    """See admission.limits.Meters. Tenants beyond the segment's columns are metered by each process for itself."""

    def __init__(self, segment: Segment, row: int) -> None:
        self._segment = segment
        self._table = RowTable(segment, segment.layout.tenants, row)
        self._local = Meters()
        self._meters: dict[str, tuple[TenantLimits, SharedMeter]] = {}

    def of(self, tenant: Tenant, now: float) -> Meter:
        """This tenant's meter."""
        limits, meter = self._meters.get(tenant.tenant_id, (None, None))
        if meter is not None and limits == tenant.limits:
            return meter
        column = self._table.column(tenant.tenant_id)
        if column is None:
            return self._local.of(tenant, now)
        assert len(self._meters) <= METERS_MAX, "more columns than there are"
        meter = SharedMeter(tenant.limits, self._segment, self._table, column)
        self._meters[tenant.tenant_id] = (tenant.limits, meter)
        return meter


