"""Tier ratios: a disk slower than computing is found out and passed over, a fast one used, and both tried again."""

from __future__ import annotations

import pytest

from gateway.routing.cost import SLOW_TIER_RATIO, CandidateCost
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import LoadView
from gateway.routing.picker import PickInput, RoutingDecision, pick
from gateway.routing.prefix_index import Match
from gateway.routing.tier_ratios import RATIO_MAX, RATIO_MIN, SPARED_S_MIN, STALE_S, TierRatios

VIEWS = [EndpointView(name, "1", prefill_tokens_per_s=1000.0, decode_step_s=0.02) for name in ("holder", "empty")]


class World:
    """One endpoint holds 60 of a prompt's 63 blocks in a tier that truly takes `ratio`."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.tiers = TierRatios()
        self.now = 0.0

    def pick(self, *, num_active: int = 0) -> RoutingDecision:
        decision = pick(PickInput(VIEWS, 1000, matches={"holder": Match(60, 0, 60)},
                                  loads={"holder": LoadView(num_active, 0, 0)},
                                  tier_ratio_of=lambda name: self.tiers.ratio(name, now=self.now)))
        assert isinstance(decision, RoutingDecision)
        return decision

    def request(self) -> str:
        """Where it went; its first token came as late as it does there."""
        cost = self.pick().cost
        assert cost is not None
        others_s = cost.prefill_s + cost.queue_s + cost.steps_s
        self.tiers.saw(cost, others_s + self.ratio * cost.spared_s, now=self.now)
        self.now += 1.0
        return cost.endpoint_id


def test_a_disk_ten_times_as_slow_as_computing_is_passed_over_soon_and_tried_again_later() -> None:
    world = World(10.0)
    went = [world.request() for _ in range(20)]
    assert went[:2] == ["holder"] * 2
    assert went[8:] == ["empty"] * 12
    assert 1.0 <= world.tiers.ratio("holder", now=world.now) <= 10.0
    world.now += STALE_S + 20
    assert world.tiers.ratio("holder", now=world.now) == SLOW_TIER_RATIO
    assert world.request() == "holder"


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5])
def test_a_tier_that_is_faster_than_computing_is_used_and_known(ratio: float) -> None:
    world = World(ratio)
    assert [world.request() for _ in range(40)] == ["holder"] * 40
    assert world.tiers.ratio("holder", now=world.now) == pytest.approx(ratio, rel=0.05)


def test_a_stray_one_does_little_and_the_ratio_is_bounded() -> None:
    world = World(SLOW_TIER_RATIO)
    cost = world.pick().cost
    assert cost is not None
    world.tiers.saw(cost, 1000.0, now=0.0)
    assert world.tiers.ratio("holder", now=0.0) < 2 * SLOW_TIER_RATIO
    for first_token_s, bound in ((1e6, RATIO_MAX), (0.0, RATIO_MIN)):
        for _ in range(100):
            world.tiers.saw(cost, first_token_s, now=0.0)
        assert world.tiers.ratio("holder", now=0.0) == bound


def test_what_says_nothing_about_loading_teaches_nothing() -> None:
    tiers = TierRatios()
    cost = World(1.0).pick().cost
    assert cost is not None
    for other in (cost._replace(room_s=0.1), cost._replace(spared_s=SPARED_S_MIN / 2), cost._replace(spared_s=0.0)):
        tiers.saw(other, 50.0, now=0.0)
        assert tiers.ratio("holder", now=0.0) == SLOW_TIER_RATIO
    tiers.saw(cost, 50.0, now=0.0)
    assert tiers.ratio("holder", now=0.0) > SLOW_TIER_RATIO
    assert tiers.ratio("another", now=0.0) == SLOW_TIER_RATIO
    tiers.forget("holder")
    assert tiers.ratio("holder", now=0.0) == SLOW_TIER_RATIO


def test_a_long_wait_for_other_things_counts_for_little() -> None:
    def learned(cost: CandidateCost) -> float:
        tiers = TierRatios()
        tiers.saw(cost, cost.prefill_s + cost.queue_s + cost.steps_s + 2 * cost.spared_s, now=0.0)
        return tiers.ratio("holder", now=0.0) - SLOW_TIER_RATIO

    cost = World(1.0).pick().cost
    assert cost is not None
    assert 0 < learned(cost._replace(queue_s=100.0)) < learned(cost) / 10
