"""Cores that simulated workers share with each other and with everybody else on the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.sim.shared_cores import LENGTH_ROUNDS, SAMPLE_S, Machines, OthersWork, SharedCores

seconds = st.floats(1e-4, 0.5)


@given(cores=st.integers(1, 4), alone_s=seconds, num_workers=st.integers(1, 6))
def test_workers_share_the_cores_evenly(cores: int, alone_s: float, num_workers: int) -> None:
    shared = SharedCores(cores)
    for number in range(num_workers):
        took_s = shared.begin(f"w{number}", alone_s, 0.0)
        assert took_s == pytest.approx(alone_s * max(1.0, (number + 1) / cores))
    for number in range(1, num_workers):
        shared.rest(f"w{number}")
    assert shared.begin("w0", alone_s, 1.0) == pytest.approx(alone_s)


@given(cores=st.integers(1, 4), num_workers=st.integers(1, 6), alone_s=st.floats(1e-3, 0.1),
       share=st.floats(0.0, 0.7), now=st.floats(0.0, 3.0))
def test_programs_that_keep_some_cores_busy_leave_the_rest(cores: int, num_workers: int, alone_s: float, share: float,
                                                           now: float) -> None:
    busy = share * cores
    shared = SharedCores(cores, OthersWork(other_programs=(busy * SAMPLE_S,) * 40))
    took_s = [shared.begin(f"w{number}", alone_s, now) for number in range(num_workers)][-1]
    fair_s = max(alone_s, num_workers * alone_s / (cores - busy))
    assert took_s <= fair_s * 1.0001
    assert took_s >= max(alone_s, fair_s * (1 - share ** LENGTH_ROUNDS) * 0.99), "each round comes so much closer"


@given(programs=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=8), alone_s=seconds, now=st.floats(0.0, 5.0))
def test_what_programs_do_counts_in_its_own_time(programs: list[float], alone_s: float, now: float) -> None:
    shared = SharedCores(1, OthersWork(other_programs=tuple(programs)))
    took_s = shared.begin("w0", alone_s, now)
    assert alone_s <= took_s <= alone_s + sum(programs) * 1.0001
    if now >= SAMPLE_S * len(programs):
        assert took_s == alone_s


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=30))
def test_serving_is_paid_by_whoever_computes_and_by_each_core_once(arrivals: list[tuple[int, int]]) -> None:
    """Two workers on two cores: what both wait in all is what serving took."""
    shared = SharedCores(2, OthersWork(request_s=0.01, token_s=0.001))
    names = ("w0", "w1")
    for name in names:
        shared.begin(name, 0.1, 0.0)
    waited_s = 0.0
    for num_requests, num_tokens in arrivals:
        for _ in range(num_requests):
            shared.arrived()
        shared.streamed(num_tokens)
        waited_s += sum(shared.begin(name, 0.1, 0.0) - 0.1 for name in names)
    assert waited_s == pytest.approx(sum(0.01 * requests + 0.001 * tokens for requests, tokens in arrivals))


def test_what_came_while_a_worker_had_nothing_to_do_is_not_its_to_pay() -> None:
    shared = SharedCores(1, OthersWork(request_s=0.01))
    shared.begin("w0", 0.1, 0.0)
    shared.rest("w0")
    shared.arrived()
    assert shared.begin("w0", 0.1, 1.0) == pytest.approx(0.1)


def test_with_a_core_each_they_share_only_where_others_are_told_of() -> None:
    assert Machines(2, 2).cores_of(0) is None
    others = Machines(2, 2, OthersWork(request_s=1e-3))
    assert others.cores_of(0) is others.cores_of(1) is not others.cores_of(2)
    assert others.core_sets(["a", "b"]) == ()
