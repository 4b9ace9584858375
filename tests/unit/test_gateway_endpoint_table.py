"""What routing is shown of a worker: states, knowledge, and load without what has ended since the report."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.knowledge.discovery.static import DiscoveredWorker
from gateway.knowledge.endpoint_table import Endpoint, EndpointState, EndpointTable
from gateway.knowledge.engines.headstart import BlockCounts, Cpu, LoadReport, Rates, WorkerReport
from gateway.routing.endpoint import Knowledge
from gateway.routing.fading_rates import FADES_AFTER_S, HALF_LIFE_S
from gateway.routing.load_ledger import NO_LOAD, LoadView
from worker.protocol.block_hash import HashScheme

SCHEME = HashScheme(block_size=16, seed=b"", model="m", weights="w", tokenizer="t", template="c", kv_dtype="f",
                    exactness="fast")


def worker(name: str) -> DiscoveredWorker:
    return DiscoveredWorker(name, f"http://{name}", None, None, None)


def report(load: LoadReport | None = None, *, model: str = "m", draining: bool = False) -> WorkerReport:
    return WorkerReport(engine="headstart", epoch="e", model=model, hash_scheme={}, hash_scheme_digest="d",
                        block_size=16, max_context=100, load=load or LoadReport(), draining=draining,
                        blocks=BlockCounts(total=10, free=2, cached=3, used=5))


def joined(name: str = "a", **more: object) -> Endpoint:
    fields = {"reachable": True, "joined_epoch": "e", "report": report(), "scheme": SCHEME, **more}
    return Endpoint(worker(name), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "state"), [
    ({}, EndpointState.READY), ({"reachable": False}, EndpointState.UNREADY),
    ({"joined_epoch": None}, EndpointState.UNREADY), ({"drain_requested": True}, EndpointState.DRAINING),
    ({"report": report(draining=True)}, EndpointState.DRAINING), ({"compatible": False}, EndpointState.INCOMPATIBLE),
    ({"compatible": False, "drain_requested": True}, EndpointState.DRAINING),
    ({"reachable": False, "drain_requested": True}, EndpointState.UNREADY),
])
def test_states(fields: dict[str, object], state: EndpointState) -> None:
    assert joined(**fields).state is state


def test_knowledge_is_exact_only_while_the_feed_is_in_sequence() -> None:
    endpoint = joined()
    assert endpoint.knowledge is Knowledge.APPROXIMATE
    endpoint.feed.in_sequence = True
    assert endpoint.knowledge is Knowledge.EXACT
    endpoint.compatible = False
    assert endpoint.knowledge is Knowledge.NONE
    assert joined(scheme=None).knowledge is Knowledge.NONE


def test_a_worker_that_has_just_answered_us_is_not_busy() -> None:
    load = LoadReport(running=1, running_prefill_tokens=200, decode_context_tokens=300)
    endpoint = joined(report=report(load), own_load_at_report=LoadView(1, 200, 300))
    view = endpoint.view(NO_LOAD)
    assert (view.num_running, view.running_prefill_tokens, view.decode_context_tokens) == (0, 0, 0)


def test_the_load_of_others_stays() -> None:
    load = LoadReport(running=3, waiting=2, waiting_prefill_tokens=500, running_prefill_tokens=200)
    view = joined(report=report(load), own_load_at_report=LoadView(1, 100, 0)).view(NO_LOAD)
    assert (view.num_running, view.num_waiting) == (2, 2)
    assert view.waiting_prefill_tokens + view.running_prefill_tokens == 600
    assert view.kv_usage_ratio == 0.5


COUNTS = st.integers(0, 20)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_the_correction_takes_off_what_ended_and_beside_others_adds_what_is_new(
        running: int, waiting: int, before: int, now: int) -> None:
    endpoint = joined(report=report(LoadReport(running=running, waiting=waiting)),
                      own_load_at_report=LoadView(before, 0, 0))
    view = endpoint.view(LoadView(now, 0, 0))
    reported = running + waiting
    if reported > before:   # somebody else is there
        assert view.num_running + view.num_waiting == reported - before + now
    else:
        assert view.num_running + view.num_waiting == max(0, reported - max(0, before - now))
    assert view.num_running >= 0
    assert view.num_waiting >= 0


def test_incompatible_workers_serve_only_when_nobody_else_does() -> None:
    table = EndpointTable((worker("a"), worker("b"), worker("c")))
    a, b, c = table
    for endpoint, model, compatible in ((a, "m", True), (b, "m", False), (c, "other", True)):
        endpoint.reachable, endpoint.joined_epoch = True, "e"
        endpoint.report, endpoint.compatible = report(model=model), compatible
    assert table.serving("m") == (a,)
    a.reachable = False
    assert table.serving("m") == (b,)
    b.drain_requested = True
    assert table.serving("m") == ()
    assert table.models() == ["m", "other"]
    assert table.get("x") is None


def test_workers_on_the_same_cores_crowd_each_other_whatever_their_model() -> None:
    table = EndpointTable(tuple(map(worker, "abcd")))
    one_core, another = Cpu("x", cores=1, threads=1), Cpu("y", cores=1, threads=1)
    for endpoint, model, cpu in zip(table, "mnmm", (one_core, one_core, another, None), strict=True):
        endpoint.report, endpoint.joined_epoch = msgspec.structs.replace(report(model=model), cpu=cpu), "e"
    crowding = table.crowding({"a": LoadView(num_inflight=2)})
    assert {name: crowd.is_full for name, crowd in crowding.items()} == {"a": True, "b": True}
    assert crowding["b"].num_prompts == 2
    first, second, *_ = table
    first.joined_epoch = None
    assert table.crowding({}) == {}, "a worker that has not joined computes nothing of ours"
    first.joined_epoch = "e"
    assert set(table.crowding({})) == {"a", "b"}
    second.report = msgspec.structs.replace(report(), cpu=another)
    assert set(table.crowding({})) == {"b", "c"}
    table.remove("c")
    assert table.crowding({}) == {}


def test_views_of_many_are_what_each_would_show_now_whatever_changes() -> None:
    table = EndpointTable((worker("a"), worker("b")))
    endpoints = tuple(table)
    for endpoint in endpoints:
        endpoint.reachable, endpoint.joined_epoch, endpoint.report, endpoint.scheme = True, "e", report(), SCHEME
    first, second = endpoints
    loads = {"a": LoadView(1, 100, 50), "b": NO_LOAD}
    before = table.views(endpoints, loads)
    again = table.views(endpoints, loads)
    assert all(old is new for old, new in zip(before, again, strict=True)), "nothing has changed"
    first.feed.in_sequence = True
    assert [view.knowledge for view in table.views(endpoints, loads)] == [Knowledge.EXACT, Knowledge.APPROXIMATE]
    second.report = report(LoadReport(running=3))
    second.own_load_at_report = LoadView(3, 0, 0)
    assert table.views(endpoints, loads)[1].num_running == 0
    assert table.views(endpoints, {**loads, "b": LoadView(2, 0, 0)})[1].num_running == 2


def test_rates_that_nothing_confirms_fade_to_what_peers_report_until_a_request_goes_there() -> None:
    table = EndpointTable((worker("a"), worker("b")))
    a, b = table
    for endpoint, rates in ((a, Rates(4000.0, 0.02)), (b, Rates(1000.0, 0.08))):
        endpoint.report, endpoint.joined_epoch = msgspec.structs.replace(report(), rates=rates), "e"
        table.fade_rates(endpoint, 0.0)
    table.fade_rates(b, FADES_AFTER_S + HALF_LIFE_S)
    view = b.view(NO_LOAD)
    assert (view.prefill_tokens_per_s, view.decode_step_s) == (2000.0, 0.04)
    assert a.view(NO_LOAD).prefill_tokens_per_s == 4000.0
    table.tried(b, FADES_AFTER_S + HALF_LIFE_S)
    assert b.view(NO_LOAD).prefill_tokens_per_s == 1000.0
    table.fade_rates(b, 2 * FADES_AFTER_S + HALF_LIFE_S)
    assert b.faded_rates is None
    table.fade_rates(b, 1e6)
    assert b.faded_rates is not None
    b.own_load_at_report = LoadView(1, 0, 100)
    table.fade_rates(b, 1e6)
    assert b.faded_rates is None, "a request of ours is there"
    b.own_load_at_report = NO_LOAD
    table.fade_rates(b, 2e6)
    table.forget_rates(b)
    assert b.faded_rates is None, "another process"
