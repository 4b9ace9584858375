"""The pass over a small fleet in which nothing is unusual, against the choice by everybody's cost in full."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.load_ledger import LoadView
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision, pick
from gateway.routing.prefix_index import Match
from gateway.routing.usual_cost import FEW_MAX, STANDINGS_MAX, Standings, cheapest
from tests.property.test_picker_properties import inputs
from tests.support.plain_choice import check_as_if_all_were_priced

NAMES = "abcde"
small = st.integers(0, 3)   # few values: ties are what is easy to get wrong
usual_views = st.builds(
    EndpointView, endpoint_id=st.sampled_from(NAMES), epoch=st.just("1"), models=st.just(frozenset({"m"})),
    draining=st.integers(0, 9).map(lambda drawn: not drawn), knowledge=st.sampled_from(Knowledge),
    block_size=st.just(16), max_context=st.sampled_from([0, 4000]),
    prefill_tokens_per_s=st.sampled_from([400.0, 4000.0, 4010.0]), decode_step_s=st.sampled_from([0.01, 0.06]),
    blocks_total=st.sampled_from([0, 4000]), blocks_free=st.integers(2000, 4000), blocks_cached=st.integers(0, 1000),
    num_running=small, num_waiting=small, waiting_prefill_tokens=st.sampled_from([0, 100]),
    decode_context_tokens=st.integers(0, 5000), step_tokens=st.sampled_from([0, 512]),
    price_s=st.sampled_from([0.0, 2.0]))
usual_loads = st.builds(LoadView, small, st.sampled_from([0, 100, 101]), st.integers(0, 5000), small, st.just(0))
usual_inputs = st.builds(
    PickInput, endpoints=st.lists(usual_views, max_size=5, unique_by=lambda view: view.endpoint_id),
    prompt_tokens=st.integers(0, 3000), model=st.sampled_from([None, "m"]),
    matches=st.none() | st.dictionaries(st.sampled_from(NAMES),
                                        st.builds(Match, st.integers(0, 200), small, st.just(0))),
    loads=st.dictionaries(st.sampled_from(NAMES), usual_loads), expected_output_tokens=st.integers(0, 512),
    excluded=st.frozensets(st.sampled_from(NAMES), max_size=1), context_tokens=st.sampled_from([0, 5000]),
    random_ratio=st.floats(0, 1, exclude_max=True),
    busy_step_of=st.dictionaries(st.sampled_from(NAMES), st.floats(0, 0.1)).map(
        lambda seen: lambda name, num_active: seen.get(name, 0.0) * num_active))


def facts(decision: RoutingDecision | NoEndpoint) -> object:
    """All of it but what it was made from."""
    if isinstance(decision, NoEndpoint):
        return decision
    return structs.asdict(structs.replace(decision, considered=None)), decision.candidates


@settings(max_examples=120, deadline=None)
@given(first=usual_inputs, second=usual_inputs, unusual=inputs)
def test_it_decides_what_the_plain_way_decides_to_the_last_bit(first: PickInput, second: PickInput,
                                                               unusual: PickInput) -> None:
    standings = Standings()
    mixed = structs.replace(second, endpoints=first.endpoints, matches=first.matches)   # the same views, other loads
    for asked in (first, second, mixed, first, unusual):
        quick = pick(structs.replace(asked, standings=standings))
        assert facts(quick) == facts(pick(asked))
        if isinstance(quick, RoutingDecision):
            check_as_if_all_were_priced(quick, asked.random_ratio)


@settings(max_examples=60, deadline=None)
@given(given_=usual_inputs)
def test_where_nothing_is_unusual_it_does_decide(given_: PickInput) -> None:
    assert (cheapest(given_, Standings()) is None) == isinstance(pick(given_), NoEndpoint) or is_passed_over(given_)


def is_passed_over(given_: PickInput) -> bool:
    """Whether all contexts are too short: then the longest says so, which is not usual."""
    return any(view.max_context and view.max_context < given_.context_tokens for view in given_.endpoints)


def test_of_a_large_fleet_it_gives_up_and_of_a_changing_one_it_forgets() -> None:
    fleet = [EndpointView(str(number), "1", prefill_tokens_per_s=4000.0, decode_step_s=0.01)
             for number in range(FEW_MAX + 1)]
    standings = Standings()
    assert cheapest(PickInput(fleet, 100), standings) is None
    assert cheapest(PickInput(fleet[:FEW_MAX], 100), standings) is not None
    for number in range(STANDINGS_MAX + 10):
        cheapest(PickInput([structs.replace(fleet[0], endpoint_id=str(number))], 100), standings)
    assert len(standings.by_id) <= STANDINGS_MAX
