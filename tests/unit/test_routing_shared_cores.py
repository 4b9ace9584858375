"""Endpoints on the same cores: who crowds whom, what that costs, and that nobody is woken for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.copies import SPARE_BUSY_MAX
from gateway.routing.cost import CROWD_WEIGHT, STALL_WEIGHT, Rates, Work, candidate_cost
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.picker import PickInput, RoutingDecision, pick
from gateway.routing.prefix_index import NO_MATCH, Match
from gateway.routing.recent_load import RecentLoad
from gateway.routing.shared_cores import CoreSet, CpuShare, Crowding, crowded, crowding_of

FOUR_ON_TWO = CoreSet(2, dict.fromkeys("abcd", 1))
VIEWS = [EndpointView(name, "1", prefill_tokens_per_s=1000.0, decode_step_s=0.02) for name in "abcd"]
BUSY = LoadView(num_inflight=5, queued_prefill_tokens=600, decode_context_tokens=900, num_decoding=3)


def test_only_where_threads_are_more_than_cores() -> None:
    def shares(*threads: int, cpu_id: str = "x", cores: int = 2) -> list[CpuShare]:
        return [CpuShare(f"{cpu_id}{number}", cpu_id, cores, count) for number, count in enumerate(threads)]
    assert crowded(shares(1, 1)) == ()
    assert crowded(shares(4)) == (), "nobody but itself"
    assert crowded([*shares(1, 1), *shares(1, 1, cpu_id="y")]) == (), "other cores"
    assert crowded([*shares(1, 1), *shares(1, 2, cpu_id="y")]) == (CoreSet(2, {"y0": 1, "y1": 2}),)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 5), st.booleans()),
                                   min_size=2, max_size=6))
def test_work_is_added_up_by_ledger_or_report(cores: int, rows: list[tuple[int, int, int, bool]]) -> None:
    views, loads = {}, {}
    for number, (_, prompts, streams, by_report) in enumerate(rows):
        if by_report:
            views[str(number)] = EndpointView(str(number), "1", num_waiting=prompts, num_running=streams)
        else:
            loads[str(number)] = LoadView(prompts + streams, num_decoding=streams)
    found = crowding_of([CoreSet(cores, {str(at): row[0] for at, row in enumerate(rows)})], views, loads)
    for number, (threads, *own, _) in enumerate(rows):
        busy = sum(row[0] for row in rows if row[1] + row[2])
        others = busy - (threads if own[0] + own[1] else 0)
        assert found[str(number)] == Crowding(
            cores, min(1.0, busy / cores), busy >= cores or others + threads > cores,
            sum(row[1] for row in rows), sum(row[2] for row in rows))


@pytest.mark.parametrize(("busy", "is_full"), [("", False), ("a", False), ("ab", True), ("abc", True)])
def test_work_on_full_cores_is_paid_by_all_who_share_them(busy: str, is_full: bool) -> None:
    crowding = crowding_of([FOUR_ON_TWO], {}, dict.fromkeys(busy, BUSY))
    works = Work(1000, 100), Work(1000, 100, crowding=crowding)
    for view in VIEWS:
        load = BUSY if view.endpoint_id in busy else NO_LOAD
        alone, here = (candidate_cost(view, NO_MATCH, load, work, rates=Rates()) for work in works)
        waiting = len(busy) * (2 + STALL_WEIGHT * 3)
        assert here.others_s - alone.others_s == pytest.approx(
            CROWD_WEIGHT * alone.prefill_s * waiting / 2 if is_full else 0.0)
        assert here.first_token_s == alone.first_token_s


@pytest.mark.parametrize(("core_sets", "chosen"), [((), "c"), ((FOUR_ON_TWO,), "a")])
def test_an_idle_endpoint_on_full_cores_is_not_woken_to_compute_again(core_sets: tuple[CoreSet, ...],
                                                                      chosen: str) -> None:
    loads = {"a": BUSY, "b": BUSY, "d": BUSY} if not core_sets else {"a": BUSY, "b": BUSY}
    decision = pick(PickInput(endpoints=VIEWS, prompt_tokens=600, matches={"a": Match(30, 0)}, loads=loads,
                              expected_output_tokens=16, crowding=crowding_of(core_sets, {}, loads)))
    assert isinstance(decision, RoutingDecision)
    assert decision.endpoint_id == chosen


def test_an_idle_endpoint_on_busy_cores_is_not_spare() -> None:
    alone, sharing = RecentLoad(), RecentLoad()
    for look in range(41):
        alone.look(VIEWS, {"a": BUSY}, look / 4)
        sharing.look(VIEWS, {"a": BUSY}, look / 4, crowding_of([FOUR_ON_TWO], {}, {"a": BUSY}))
    for recent, busy_share in ((alone, 0.0), (sharing, 0.5)):
        judged = recent.of("d")
        assert judged is not None
        assert judged.busy_share == pytest.approx(busy_share)
        assert (judged.busy_share <= SPARE_BUSY_MAX) is (recent is alone)
