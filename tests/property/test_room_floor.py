"""Floors under the wait for memory: never above a cost, and no pick is another for them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.routing.cost import Rates, candidate_cost
from gateway.routing.load_ledger import NO_LOAD
from gateway.routing.memory_wait import Stream, Streams
from gateway.routing.output_length import LengthProfile
from gateway.routing.picker import PickInput, RoutingDecision, pick
from gateway.routing.prefix_index import NO_MATCH, Match
from gateway.routing.room_floor import RoomFloors
from loadtests.bench.full_fleet import full_fleet
from tests.support.plain_choice import check_as_if_all_were_priced

seeds = st.integers(0, 2**32)


def crowded(seed: int) -> PickInput:
    """Full endpoints in other moods too: some with room, without streams of ours, with others' work, unmeasured."""
    draw = random.Random(seed)
    fleet = full_fleet(draw, draw.choice((14, 20, 40)))
    views, matches = [], {}
    streams = {view.endpoint_id: fleet.streams_of(view.endpoint_id) for view in fleet.endpoints}
    for view in fleet.endpoints:
        matches[view.endpoint_id] = draw.choice((NO_MATCH, Match(draw.randrange(400), draw.randrange(9), 0)))
        if draw.random() < 0.1:
            streams[view.endpoint_id] = ()
        views.append(structs.replace(
            view, prefill_tokens_per_s=draw.choice((view.prefill_tokens_per_s, 4000.0, 0.0)),
            decode_step_s=draw.choice((view.decode_step_s, 0.02, 0.0)),
            blocks_total=draw.choice((5000, 5000, 40, 0)), blocks_free=draw.choice((0, 0, 50, 4000)),
            blocks_cached=draw.choice((0, 300)), num_running=draw.choice((0, view.num_running, 40)),
            held_tokens_at_report=view.held_tokens_at_report + draw.choice((0, 0, -90_000, 500)),
            others_ratio=draw.choice((0.0, 0.3)), price_s=draw.choice((0.0, 0.0, 1.0)),
            step_tokens=draw.choice((0, 512))))
    return structs.replace(
        fleet, endpoints=views, matches=matches, prompt_tokens=draw.choice((1, 700, 6000, 9000)),
        loads={name: load for name, load in fleet.loads.items() if draw.random() < 0.95},
        streams_of=lambda name: streams[name], chain=draw.choice((fleet.chain, (), fleet.chain[:100])),
        lengths=draw.choice((fleet.lengths, LengthProfile((), 0.0))), shared_ratio=draw.random(),
        session_endpoint_id=draw.choice((None, "worker-3")), random_ratio=draw.random(), stretch=draw.uniform(1, 4))


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_no_floor_is_above_its_cost(seed: int) -> None:
    there, rates = crowded(seed), Rates()
    work, matches = there.work(), there.matches or {}
    rows = [(view, there.loads.get(view.endpoint_id, NO_LOAD), matches[view.endpoint_id]) for view in there.endpoints]
    costs = [candidate_cost(view, match, load, work, rates=rates).total_s for view, load, match in rows]
    for at, total_s in enumerate(costs):
        assert at in RoomFloors(rows, work, rates).within(total_s)


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_the_pick_is_as_if_all_had_been_priced(seed: int) -> None:
    there = crowded(seed)
    decision = pick(there)
    assert isinstance(decision, RoutingDecision)
    check_as_if_all_were_priced(decision, there.random_ratio)


def test_where_all_wait_few_are_priced() -> None:
    fleet = full_fleet(random.Random(3), 64)
    rows = [(view, fleet.loads[view.endpoint_id], (fleet.matches or {})[view.endpoint_id])
            for view in fleet.endpoints]
    decision = pick(fleet)
    assert isinstance(decision, RoutingDecision)
    assert decision.cost is not None
    assert decision.cost.room_s > 0
    assert len(RoomFloors(rows, fleet.work(), Rates()).within(decision.cost.total_s)) < 12


@given(st.lists(st.integers(0, 300), max_size=40), st.floats(0, 300), st.lists(st.tuples(
    st.floats(0, 400), st.integers(0, 400)), min_size=1, max_size=20))
def test_what_is_left_of_many_is_what_is_left_of_each(lengths: list[int], mean: float,
                                                      midway: list[tuple[float, int]]) -> None:
    generated, expected = np.array(midway).T
    together = LengthProfile(lengths, mean).all_left(generated, expected)
    assert together == pytest.approx([LengthProfile(lengths, mean).left(*one) for one in midway])


def test_streams_remember_their_columns() -> None:
    streams = Streams([Stream(500, 20, 128, 7.5, (), 300), Stream(900, 900, 64, None)])
    held, output, began_at, inherited = streams.columns
    assert (held.tolist(), output.tolist(), began_at[0], inherited.tolist()) == ([500, 900], [128, 64], 7.5, [300, 0])
    assert np.isnan(began_at[1])
    assert streams.columns is streams.columns
