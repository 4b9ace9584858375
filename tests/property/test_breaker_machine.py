"""The breaker against a naive model that replays its whole history at every question."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.routing.breaker import Breaker, BreakerLimits, BreakerPass, BreakerState

LIMITS = BreakerLimits(failures_max=3, open_s=2.0, open_max_s=7.0, probes_max=2)


@dataclass(eq=False)
class ModelRequest:
    """A request as the model sees it: in which era it counts, and whether it is a probe that is still out."""

    era: int
    is_probe: bool


class BreakerMachine(RuleBasedStateMachine):
    """`history` has what counted since the last change; the rest follows from the rules in words."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(LIMITS)
        self.now = 0.0
        self.era = 0
        self.open_until: float | None = None
        self.row = 0
        self.failed_probes = 0
        self.out: list[ModelRequest] = []

    def state(self) -> BreakerState:
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.now < self.open_until else BreakerState.HALF_OPEN

    def change(self, open_until: float | None) -> None:
        self.era += 1
        self.open_until = open_until

    def probes(self) -> int:
        return sum(request.is_probe and request.era == self.era for request in self.out)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=requests)
    def begin(self) -> tuple[BreakerPass, ModelRequest]:
        request = ModelRequest(self.era, self.open_until is not None)
        self.out.append(request)
        return self.breaker.begin(), request

    @rule(pair=requests)
    def first_byte(self, pair: tuple[BreakerPass, ModelRequest]) -> None:
        passed, request = pair
        passed.answered()
        if request.era != self.era:
            return
        if self.open_until is not None:
            self.change(None)
            self.row = LIMITS.failures_max - 1
        request.era, request.is_probe = self.era, False

    @rule(pair=consumes(requests), how=st.sampled_from(["succeeded", "failed", "left"]),
          again=st.sampled_from(["succeeded", "failed", "left", "answered"]))
    def end(self, pair: tuple[BreakerPass, ModelRequest], how: str, again: str) -> None:
        passed, request = pair
        for word in (how, again):  # the second one must not count
            passed.failed(self.now) if word == "failed" else getattr(passed, word)()
        self.out.remove(request)
        if request.era != self.era or how == "left":
            return
        if how == "succeeded":
            if self.open_until is not None:
                self.change(None)
            self.row = self.failed_probes = 0
        elif self.open_until is not None:
            self.failed_probes += 1
            self.change(self.now + min(LIMITS.open_s * 2**self.failed_probes, LIMITS.open_max_s))
        else:
            self.row += 1
            if self.row >= LIMITS.failures_max:
                self.change(self.now + min(LIMITS.open_s * 2**self.failed_probes, LIMITS.open_max_s))

    @invariant()
    def agree(self) -> None:
        self.breaker.check_invariants()
        assert self.breaker.state(self.now) is self.state()
        expected = self.state() is BreakerState.CLOSED or (
            self.state() is BreakerState.HALF_OPEN and self.probes() < LIMITS.probes_max)
        assert self.breaker.may_send(self.now) == expected


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_five_failures_open_it_and_a_probe_closes_it() -> None:
    breaker = Breaker(BreakerLimits())
    for number in range(5):
        assert breaker.may_send(0.0), number
        breaker.begin().failed(0.0)
    assert breaker.state(1.9) is BreakerState.OPEN
    assert not breaker.may_send(1.9)
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    probe = breaker.begin()
    assert not breaker.may_send(2.0), "one probe at a time"
    probe.answered()
    assert breaker.state(2.0) is BreakerState.CLOSED
    breaker.begin().failed(3.0)
    assert breaker.state(3.0) is BreakerState.OPEN, "one failure is enough until a request has ended well"


@pytest.mark.parametrize("end", ["left", "succeeded"])
def test_what_is_no_failure_never_opens_it(end: str) -> None:
    breaker = Breaker(BreakerLimits(failures_max=2))
    for _ in range(10):
        getattr(breaker.begin(), end)()
        assert breaker.state(0.0) is BreakerState.CLOSED


def test_old_requests_say_nothing() -> None:
    breaker = Breaker(BreakerLimits(failures_max=1, open_s=1.0))
    old, older = breaker.begin(), breaker.begin()
    breaker.begin().failed(0.0)
    old.succeeded()
    assert breaker.state(0.5) is BreakerState.OPEN
    older.failed(0.9)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
