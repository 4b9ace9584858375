"""How a choice is spread where others choose as well."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.routing.cost import CandidateCost, Rates, Work, candidate_cost
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD
from gateway.routing.others_share import MEAN_OVER_S, SHARED_MIN
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision, pick
from gateway.routing.prefix_index import NO_MATCH
from gateway.routing.unseen_work import REQUESTS_MIN, UnseenWork, spread
from tests.property.test_picker_properties import inputs
from tests.support.plain_choice import check_as_if_all_were_priced

grounds = st.lists(st.tuples(st.floats(-1, 5), st.floats(1e-3, 10)), min_size=1, max_size=8)
DRAWS, UNSEEN = 500, 3.0


def costs_of(ground: list[tuple[float, float]]) -> list[CandidateCost]:
    view, work = EndpointView("a", "1"), Work(1, 1)
    cost = candidate_cost(view, NO_MATCH, NO_LOAD, work, rates=Rates())
    return [cost._replace(total_s=total_s, prefill_s=width, others_s=0.0) for total_s, width in ground]


def chances(ground: list[tuple[float, float]]) -> list[float]:
    costs = costs_of(ground)
    drawn = Counter(spread(costs, UNSEEN, (number + 0.5) / DRAWS) for number in range(DRAWS))
    return [drawn[at] / DRAWS for at in range(len(costs))]


@given(grounds)
def test_all_that_are_chosen_become_equally_dear_and_nobody_who_is_not_is_cheaper(
        ground: list[tuple[float, float]]) -> None:
    costs, widths = [cost for cost, _ in ground], [UNSEEN * width for _, width in ground]
    shares = chances(ground)
    assert sum(shares) == pytest.approx(1)
    reached = [cost + share * width for cost, share, width in zip(costs, shares, widths, strict=True)]
    coarse = 2 * max(widths) / DRAWS
    level = max(height for height, share in zip(reached, shares, strict=True) if share)
    for height, share in zip(reached, shares, strict=True):
        assert height >= level - coarse
        assert not share or height <= level + coarse


@given(grounds, st.floats(0, 1, exclude_max=True))
def test_where_hardly_anything_is_unseen_it_is_the_cheapest(ground: list[tuple[float, float]],
                                                            random_ratio: float) -> None:
    costs = costs_of(ground)
    chosen = costs[spread(costs, REQUESTS_MIN, random_ratio)]
    assert chosen.total_s <= min(cost.total_s for cost in costs) + REQUESTS_MIN * max(width for _, width in ground)


@settings(max_examples=60, deadline=None)
@given(inputs, st.floats(0.01, 5))
def test_the_pick_is_as_if_all_had_been_priced(asked: PickInput, unseen_requests: float) -> None:
    asked = structs.replace(asked, unseen_requests=unseen_requests)
    decision = pick(asked)
    if isinstance(decision, NoEndpoint):
        return
    assert isinstance(decision, RoutingDecision)
    check_as_if_all_were_priced(decision, asked.random_ratio)


def test_a_lone_gateway_expects_nothing() -> None:
    work = UnseenWork()
    for second, reported in enumerate((0, 3, 5, 4)):
        work.booked(second)
        work.saw(5, reported, second, next_after_s=1.0)   # some are still on their way
    work.saw(0, 1, 4.0, next_after_s=1.0)   # it has just ended
    assert work.requests(4.0) == 0.0


def test_as_many_are_expected_as_are_sent() -> None:
    work = UnseenWork()
    for tenth in range(200):
        work.booked(tenth / 10)
        work.saw(5, 20, tenth / 10, next_after_s=0.4)
    assert work.requests(20.0) == pytest.approx(10 * 0.2 * 15 / 5, rel=0.1)
    assert work.requests(40.0) == 0.0


def test_others_are_remembered_while_nobody_has_work_and_forgotten_when_they_have_gone() -> None:
    work = UnseenWork()
    work.saw(1, 9, 0.0, next_after_s=1.0)
    for second in range(1, 100):
        work.saw(0, 0, second, next_after_s=1.0)
    assert work.ratio > 0.5
    for second in range(100, 100 + int(5 * MEAN_OVER_S)):
        work.saw(3, 3, second, next_after_s=1.0)
    assert work.ratio < SHARED_MIN
