"""Whose work an endpoint does."""

from __future__ import annotations

from gateway.routing.others_share import OthersShare


def test_a_lone_gateway_sees_nobody_else() -> None:
    share = OthersShare()
    for reported in (0, 3, 5, 4):
        share.saw(5, reported)   # some are still on their way
    assert share.ratio == 0.0


def test_the_share_follows_the_reports() -> None:
    share = OthersShare()
    ratios = []
    for _ in range(60):
        share.saw(5, 20)
        ratios.append(share.ratio)
    assert ratios == sorted(ratios)
    assert 0.7 < share.ratio < 0.75
    for _ in range(60):
        share.saw(5, 5)
    assert share.ratio < 0.001


def test_one_stray_request_is_no_habit() -> None:
    share = OthersShare()
    share.saw(0, 1)
    assert share.ratio < 0.3
