"""What a step takes is learned from waits: from few streams for many, from one endpoint for others, by and by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.busy_steps import CHANGE_MAX, FIXED_STREAMS, NEWEST_WEIGHT, BusySteps
from gateway.routing.cost import STEP_UNDER_WAY, CandidateCost, Rates, Work, candidate_cost
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD
from gateway.routing.prefix_index import NO_MATCH

STEP_S = 0.1


def expected(endpoint_id: str = "a", *, num_active: int = 2, prompt_tokens: int = 250,
             **changes: float) -> CandidateCost:
    """Of a prompt that meets three steps, of 20 ms as the worker says, and takes 25 ms itself."""
    view = EndpointView(endpoint_id, "1", num_running=num_active, step_tokens=100, prefill_tokens_per_s=10_000.0,
                        decode_step_s=0.02)
    return candidate_cost(view, NO_MATCH, NO_LOAD, Work(prompt_tokens, 100), rates=Rates())._replace(**changes)


def waited(cost: CandidateCost, step_s: float) -> float:
    return cost.prefill_s + cost.queue_s + cost.num_steps * step_s


def seen(times: int = 40, *, step_s: float = STEP_S, busy: BusySteps | None = None) -> BusySteps:
    """Endpoint "a" took `step_s` a step with two requests."""
    busy = busy or BusySteps()
    for _ in range(times):
        busy.saw(expected(), waited(expected(), step_s))
    return busy


def test_nothing_is_known_before_steps_were_seen() -> None:
    busy = BusySteps()
    busy.saw(expected(num_active=0), 5.0)
    busy.saw(expected(num_steps=STEP_UNDER_WAY), 5.0)
    busy.saw(expected(room_s=1.0), 5.0)
    assert busy.step_s("a", 3) == 0.0


def test_what_was_seen_with_few_says_something_about_many_and_about_others() -> None:
    busy = seen()
    assert busy.step_s("a", 2) == pytest.approx(STEP_S, rel=0.01)
    assert busy.step_s("a", 2 + 2 * (2 + FIXED_STREAMS)) == pytest.approx(3 * STEP_S, rel=0.01)
    assert busy.step_s("never seen", 2) == pytest.approx(STEP_S, rel=0.01)


def test_each_endpoint_is_judged_by_itself_and_a_new_life_begins_as_the_others_are() -> None:
    busy = seen()
    for _ in range(40):
        busy.saw(expected("b"), waited(expected("b"), 0.02))
    assert busy.step_s("a", 2) == pytest.approx(STEP_S, rel=0.01)
    assert busy.step_s("b", 2) == pytest.approx(0.02, rel=0.01)
    busy.forget("a")
    assert busy.step_s("a", 2) == pytest.approx(0.02, rel=0.1)


def test_a_wait_that_steps_were_a_small_part_of_says_less() -> None:
    much, little, few = (seen() for _ in range(3))
    short = expected(prompt_tokens=50)   # half a step beyond the one under way
    for busy, cost in ((much, expected()), (little, expected(queue_s=100 * expected().steps_s)), (few, short)):
        busy.saw(cost, waited(cost, 2 * STEP_S))
    assert STEP_S < little.step_s("a", 2) < few.step_s("a", 2) < much.step_s("a", 2)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9000), st.floats(-1e6, 1e6))))
def test_one_observation_moves_little_and_never_below_nothing(waits: list[tuple[int, int, float]]) -> None:
    busy = BusySteps()
    for num_active, prompt_tokens, first_token_s in waits:
        cost = expected(num_active=num_active, prompt_tokens=prompt_tokens)
        first = cost.steps_s / cost.num_steps / (num_active + FIXED_STREAMS) * (5 + FIXED_STREAMS)
        before = busy.step_s("a", 5) or first
        busy.saw(cost, first_token_s)
        least = 1 - NEWEST_WEIGHT * (1 - 1 / CHANGE_MAX)
        most = 1 + NEWEST_WEIGHT * (CHANGE_MAX - 1)
        assert 0 < before * least <= busy.step_s("a", 5) * 1.000001 <= before * most * 1.00001
