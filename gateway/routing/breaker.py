"""Whether a worker may be sent requests, by what became of the last ones: closed, open, half open.

Owns: the state of one breaker in one life of its worker. Must never: read a clock (`now` comes in), or count what is
the client's doing or the worker's good right (4xx, 429, 503: nobody reports those here).

Closed: everything passes; `failures_max` failures in a row open it. Open: nothing passes for `open_s`, twice as long
after each probe that fails, up to `open_max_s`. Half open: `probes_max` requests at a time pass. The first byte of
one closes it, with one failure left until a request ends well; a failure opens it again. Requests from before the
last change of state say nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    """The numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """See the top of this file."""

    failures_max: int = 5
    open_s: float = 2.0
    open_max_s: float = 30.0
    probes_max: int = 1


class Breaker:
    """One worker's."""

    __slots__ = ("_limits", "_num_failed", "_num_probing", "_open_s", "_open_until", "era")

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._num_failed = 0
        self._num_probing = 0
        self._open_s = limits.open_s
        self._open_until: float | None = None
        self.era = 0

    @property
    def is_open(self) -> bool:
        """Whether it has opened and not closed since: only then is there anything to ask of it."""
        return self._open_until is not None

    def state(self, now: float) -> BreakerState:
        """As of now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def may_send(self, now: float) -> bool:
        """Whether a request may go there now."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and self._num_probing < self._limits.probes_max)

    def begin(self) -> BreakerPass:
        """A request goes there, whether it may or not (when no other worker is left, it may)."""
        is_probe = self._open_until is not None
        self._num_probing += is_probe
        return BreakerPass(self, self.era, is_probe=is_probe)

    def check_invariants(self) -> None:
        """What holds at any time."""
        assert 0 <= self._num_failed < max(1, self._limits.failures_max) or self._open_until is not None
        assert self._num_probing >= 0
        assert self._num_probing == 0 or self._open_until is not None
        assert self._limits.open_s <= self._open_s <= max(self._limits.open_s, self._limits.open_max_s)

    # ---- for passes of this era ----------------------------------------------------------------------------------

    def _answered(self) -> None:
        if self._open_until is not None:
            self._change(open_until=None)
            self._num_failed = self._limits.failures_max - 1

    def _succeeded(self) -> None:
        if self._open_until is not None:
            self._answered()
        self._num_failed = 0
        self._open_s = self._limits.open_s

    def _failed(self, now: float) -> None:
        self._num_failed += 1
        if self._open_until is None and self._num_failed < self._limits.failures_max:
            return
        if self._open_until is not None:
            self._open_s = min(self._open_s * 2, max(self._limits.open_s, self._limits.open_max_s))
        self._change(open_until=now + self._open_s)

    def _left(self, *, is_probe: bool) -> None:
        self._num_probing -= is_probe

    def _change(self, *, open_until: float | None) -> None:
        self._open_until = open_until
        self._num_probing = 0
        self.era += 1


class BreakerPass:
    """One request's. Exactly one of succeeded(), failed() and left() counts, the first one."""

    __slots__ = ("_breaker", "_era", "_is_open", "_is_probe")

    def __init__(self, breaker: Breaker, era: int, *, is_probe: bool) -> None:
        self._breaker = breaker
        self._era = era
        self._is_probe = is_probe
        self._is_open = True

    def answered(self) -> None:
        """Its first byte is here."""
        if self._breaker.is_open and self._counts():   # to a closed one it is no news
            self._breaker._answered()
            self._era, self._is_probe = self._breaker.era, False

    def succeeded(self) -> None:
        """It was answered to the end."""
        if self._ends():
            self._breaker._succeeded()

    def failed(self, now: float) -> None:
        """The worker did not answer, or not to the end."""
        if self._ends():
            self._breaker._failed(now)

    def left(self) -> None:
        """It ended in a way that says nothing about the worker."""
        if self._is_open and self._ends():
            self._breaker._left(is_probe=self._is_probe)

    def _counts(self) -> bool:
        return self._is_open and self._era == self._breaker.era

    def _ends(self) -> bool:
        is_open, self._is_open = self._is_open, False
        return is_open and self._era == self._breaker.era
