"""The roster: bits whose reach ends, back into matches by name."""

from __future__ import annotations

from gateway.routing.roster import PLAIN_MATCHES_MAX, Match, Roster


def test_matches_are_remembered_by_depth_up_to_a_limit() -> None:
    roster = Roster()
    bits = roster.join("a").bits
    for depth in range(1, PLAIN_MATCHES_MAX + 10):
        assert roster.matches([depth], [bits]) == {"a": Match(depth, 0)}
        assert len(roster._plain) <= PLAIN_MATCHES_MAX


def test_fast_confirmed_and_speculative_reach_may_end_apart() -> None:
    roster = Roster()
    a, b = roster.join("a"), roster.join("b")
    ends = [a.fast_bit, a.confirmed_bit | b.fast_bit | b.confirmed_bit, a.any_bit | b.any_bit]
    assert roster.matches([2, 5, 9], ends) == {"a": Match(5, 4, 3), "b": Match(5, 4)}
    assert roster.matches([3, 7], [b.any_bit, a.confirmed_bit | a.any_bit]) == {"b": Match(0, 3), "a": Match(7, 0, 7)}


def test_bits_of_nobody_match_nobody() -> None:
    roster = Roster()
    gone = roster.join("gone")
    bits = roster.join("a").bits
    roster.retire("gone")
    assert roster.matches([1, 2, 3], [0, gone.bits, bits | gone.any_bit]) == {"a": Match(3, 0)}
