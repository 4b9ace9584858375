"""Whose work an endpoint does."""

from __future__ import annotations

import pytest

from gateway.routing.others_share import SHARED_LOOKS, SHARED_MIN, OthersShare, look_again_after_s


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


def test_where_others_send_work_one_looks_more_often() -> None:
    assert look_again_after_s(1.0, 0.9 * SHARED_MIN, 8) == 1.0
    assert look_again_after_s(1.0, SHARED_MIN, 8) == 1.0 / SHARED_LOOKS


@pytest.mark.parametrize("num_endpoints", [1, 20, 64, 1000])
def test_looks_at_many_endpoints_are_no_more_often_than_a_fiftieth_of_a_core_allows(num_endpoints: int) -> None:
    after_s = look_again_after_s(1.0, 0.5, num_endpoints)
    assert after_s == 1.0 or num_endpoints / after_s * 0.0004 <= 1 / 50 + 1e-9
    assert 1.0 / SHARED_LOOKS <= after_s <= 1.0
