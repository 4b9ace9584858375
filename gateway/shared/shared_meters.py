"""Tenants' limits over all processes of a gateway: admission.limits on values that lie in shared memory.

Owns: the buckets' words (written under the segment's lock) and this process's count of requests inside (its own row).
New limits apply to what the buckets hold already: what is above
a new maximum is lost, and a higher one fills in its own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from gateway.admission.budget import BudgetState
from gateway.admission.limits import METERS_MAX, BucketState, Meters, MeterState, OverLimit, TenantMeter
from gateway.admission.tenants import Tenant, TenantLimits
from gateway.shared.row_table import RowTable
from gateway.shared.segment import BUCKET_WORDS, Segment

INSIDE = 0
ADVANCE_SHARE = 512


class Meter(Protocol):
    """What admission asks of a tenant's meter; TenantMeter is one."""

    def enter(self, now: float) -> OverLimit | None: ...
    def leave(self) -> None: ...
    def take_prompt(self, num_tokens: int, now: float) -> OverLimit | None: ...
    def take_output(self, num_tokens: int, now: float) -> None: ...


class SharedMeter:
    """One tenant's meter. Instants are time.monotonic(), which all processes of a machine share.

    No lock is needed far below the limit of requests inside (row_table.py). What a process
    takes from a large bucket it takes in small advances (1 / ADVANCE_SHARE of what is there): then most requests need
    no lock either, and what is advanced to one process and refused to another is at most that share of each process.
    """

    def __init__(self, limits: TenantLimits, segment: Segment, table: RowTable, column: int, *,
                 wall_offset_s: float = 0.0) -> None:
        self._segment = segment
        self._table = table
        self._column = column
        self._at = segment.layout.buckets_at + column * BUCKET_WORDS
        self._meter = TenantMeter(limits, 0.0, wall_offset_s=wall_offset_s)
        self._max_concurrent = limits.max_concurrent
        self._has_requests = limits.requests_per_minute is not None
        self._has_tokens = limits.tokens_per_minute is not None
        self._has_budget = limits.budget is not None  # spent at once, never advanced
        self._requests_ahead = self._tokens_ahead = 0.0

    @property
    def num_inside(self) -> int:
        """Requests of this tenant under way in any process."""
        return self._table.total(self._column, INSIDE)

    def enter(self, now: float) -> OverLimit | None:
        """See TenantMeter."""
        table, column = self._table, self._column
        if self._is_advanced() and self._has_entered():
            if self._has_requests:
                self._requests_ahead -= 1.0
            return None
        with self._alone(now) as meter:  # the rest of its limits as well
            if (over := meter.enter(now)) is None:
                table.add(column, INSIDE, 1)
        return over

    def leave(self) -> None:
        """See TenantMeter."""
        assert self._table.words[self._table.own(self._column, INSIDE)] > 0, "a request left that never entered"
        self._table.add(self._column, INSIDE, -1)

    def take_prompt(self, num_tokens: int, now: float) -> OverLimit | None:
        """See TenantMeter."""
        if not self._has_tokens and not self._has_budget:
            return None
        if self._tokens_ahead >= num_tokens and not self._has_budget:
            self._tokens_ahead -= num_tokens
            return None
        with self._alone(now) as meter:
            return meter.take_prompt(num_tokens, now)

    def take_output(self, num_tokens: int, now: float) -> None:
        """See TenantMeter."""
        if not self._has_tokens and not self._has_budget:
            return
        if self._tokens_ahead >= num_tokens and not self._has_budget:
            self._tokens_ahead -= num_tokens
            return
        with self._alone(now) as meter:
            meter.take_output(num_tokens, now)

    def _has_entered(self) -> bool:
        if self._max_concurrent is not None:
            return self._table.add_within(self._column, INSIDE, self._max_concurrent)
        self._table.add(self._column, INSIDE, 1)
        return True

    def _is_advanced(self) -> bool:
        return not self._has_budget and (not self._has_requests or self._requests_ahead >= 1.0) and (
            not self._has_tokens or self._tokens_ahead > 0.0)

    @contextmanager
    def _alone(self, now: float) -> Iterator[TenantMeter]:
        """The meter as it is for all; afterwards it is written back, less this process's next advances."""
        at, reals, meter = self._at, self._segment.reals, self._meter
        with self._segment.locked:
            before = MeterState(BucketState(reals[at], reals[at + 1]), BucketState(reals[at + 2], reals[at + 3]),
                                self.num_inside, BudgetState(reals[at + 4], reals[at + 5]))
            meter.restore(before)
            meter.give_back(self._requests_ahead, self._tokens_ahead, now)
            yield meter
            self._requests_ahead, self._tokens_ahead = meter.advance(1 / ADVANCE_SHARE, now)
            requests, tokens, _, budget = meter.state(before)
            reals[at], reals[at + 1], reals[at + 2], reals[at + 3] = *requests, *tokens
            reals[at + 4], reals[at + 5] = budget


class SharedMeters:
    """See admission.limits.Meters. Tenants beyond the segment's columns are metered by each process for itself."""

    def __init__(self, segment: Segment, row: int, *, wall_offset_s: float = 0.0) -> None:
        self._segment = segment
        self._wall_offset_s = wall_offset_s
        self._table = RowTable(segment, segment.layout.tenants, row)
        self._local = Meters(wall_offset_s=wall_offset_s)
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
        meter = SharedMeter(tenant.limits, self._segment, self._table, column,
                            wall_offset_s=self._wall_offset_s)
        self._meters[tenant.tenant_id] = (tenant.limits, meter)
        return meter


