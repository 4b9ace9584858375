"""Whose work an endpoint does."""

from __future__ import annotations

import pytest

from gateway.routing.others_share import SHARED_LOOKS, SHARED_MIN, OthersShare, look_again_after_s


def test_a_lone_gateway_sees_nobody_else() -> None:
    share = OthersShare()
    for second, reported in enumerate((0, 3, 5, 4)):
        share.saw(5, reported, second)   # some are still on their way
    assert share.ratio == 0.0


def test_the_share_follows_the_reports() -> None:
    share = OthersShare()
    ratios = []
    for second in range(60):
        share.saw(5, 20, second)
        ratios.append(share.ratio)
    assert ratios == sorted(ratios)
    assert 0.7 < share.ratio < 0.75
    for second in range(60, 120):
        share.saw(5, 5, second)
    assert share.ratio < 0.001


def test_one_stray_request_is_no_habit() -> None:
    share = OthersShare()
    share.saw(0, 1, 7.0)
    assert share.ratio < 0.3


def test_more_looks_in_the_same_time_make_no_other_share() -> None:
    seldom, often = OthersShare(), OthersShare()
    for second in range(10):
        seldom.saw(5, 9, second)
        for tenth in range(10):
            often.saw(5, 9, second + tenth / 10 - 0.9 * (second > 0))
    assert often.ratio == pytest.approx(seldom.ratio, abs=0.02)


def test_where_others_send_work_one_looks_more_often() -> None:
    assert look_again_after_s(1.0, 0.9 * SHARED_MIN, 8) == 1.0
    assert look_again_after_s(1.0, SHARED_MIN, 8) == 1.0 / SHARED_LOOKS


@pytest.mark.parametrize("num_endpoints", [1, 20, 64, 1000])
def test_looks_at_many_endpoints_are_no_more_often_than_a_fiftieth_of_a_core_allows(num_endpoints: int) -> None:
    after_s = look_again_after_s(1.0, 0.5, num_endpoints)
    assert after_s == 1.0 or num_endpoints / after_s * 0.0002 <= 1 / 50 + 1e-9
    assert 1.0 / SHARED_LOOKS <= after_s <= 1.0
