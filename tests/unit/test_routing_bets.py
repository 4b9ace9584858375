"""Bets that are held while their request waits at its worker."""

from __future__ import annotations

from gateway.routing.bets import LOOK_AGAIN_S
from gateway.routing.prefix_index import Match, PrefixIndex

CHAIN = [11, 12, 13]
WHOLE = {"a": Match(0, 3)}


def test_a_held_bet_expires_after_it_was_settled_and_never_before() -> None:
    index = PrefixIndex(1 << 20)
    bet = index.speculate("a", CHAIN, 5.0)
    bet.hold(2.0)
    for now in (5.0, 50.0, 500.0):
        assert index.match(CHAIN, now) == WHOLE
        index.check_invariants()
    bet.settle(500.0)
    bet.settle(501.0)   # only the first time counts
    assert index.match(CHAIN, 501.9) == WHOLE
    assert index.match(CHAIN, 502.0 + LOOK_AGAIN_S) == {}
    index.check_invariants()


def test_one_that_is_settled_before_it_was_looked_at_expires_in_time() -> None:
    index = PrefixIndex(1 << 20)
    bet = index.speculate("a", CHAIN, 5.0)
    bet.hold(1.0)
    bet.settle(6.0)
    assert index.match(CHAIN, 6.9) == WHOLE
    assert index.match(CHAIN, 7.0) == {}


def test_a_held_bet_can_be_taken_back() -> None:
    index = PrefixIndex(1 << 20)
    bet, other = index.speculate("a", CHAIN, 5.0), index.speculate("a", CHAIN[:1], 5.0)
    bet.hold(1.0)
    other.hold(1.0)
    index.withdraw(bet)
    assert index.match(CHAIN, 9.0) == {"a": Match(0, 1)}
    index.check_invariants()
