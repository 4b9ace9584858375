"""The simulator runs the real code: skipped steps equal single ones, its decisions are the server's, its events are
the worker's, and one seed gives one report."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.routing.busy_steps import BusySteps
from gateway.routing.cost import Rates, Work, candidate_cost
from gateway.routing.endpoint import EndpointView
from gateway.routing.event_applier import EventApplier
from gateway.routing.load_ledger import LoadView
from gateway.routing.memory_wait import Stream
from gateway.routing.picker import NoEndpoint, PickInput, pick
from gateway.routing.prefix_index import NO_MATCH, Match, PrefixIndex
from loadtests.sim.block_store import HashJournal, Removed, SimPool, Stored
from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.cost_model import MODELS
from loadtests.sim.policies import POLICIES
from loadtests.sim.shortlist import Shortlist
from loadtests.sim.sim_request import requests_of, scheme_of
from loadtests.sim.sim_worker import WARM_UP_TOKENS
from loadtests.sim.simulation import SimulationPlan, prepare, report_of, run_policy
from loadtests.traces import Trace, TraceRequest, load_trace
from loadtests.workloads import WORKLOADS
from tests.support.simulated import TRACES, finished, story, trace_of
from worker.core.block_pool import BlockPool
from worker.core.sequence import Sequence, StopRule
from worker.engine.timings import EngineRates

BUSY = SimulationPlan(num_workers=3, load=0.95, capacity=0.15)


def random_trace(seed: int, num_requests: int, block_size: int) -> Trace:
    """Prompts that extend earlier ones, arrivals in clumps."""
    draw, known, next_id, at_s, requests = random.Random(seed), [[0]], 1, 0.0, []
    for _ in range(num_requests):
        ids = draw.choice(known)[:draw.randint(1, 12)] + list(range(next_id, next_id := next_id + draw.randint(1, 6)))
        known.append(ids)
        at_s += draw.choice((0.0, draw.expovariate(1.0)))
        requests.append(TraceRequest(at_s, len(ids) * block_size + draw.randrange(block_size), draw.randint(1, 90),
                                     tuple(ids)))
    return Trace("random", "synthetic", block_size, tuple(requests))


@pytest.mark.parametrize("policy", ["headstart", "round_robin"])
def test_the_coalesced_run_equals_the_step_by_step_run_on_500_requests_at_block_16(policy: str) -> None:
    trace = random_trace(7, 500, 16)
    together = finished(trace, BUSY, policy)
    one_by_one = finished(trace, SimulationPlan(num_workers=3, load=0.95, capacity=0.15, coalesce=False), policy)
    assert story(together) == story(one_by_one)
    for ours, theirs in zip(together.workers, one_by_one.workers, strict=True):
        assert ours.scheduler.counters == theirs.scheduler.counters
        assert ours.busy_s == theirs.busy_s
        assert ours.report() == theirs.report()
        ours.scheduler.check_invariants()
    assert together.clock.num_events < one_by_one.clock.num_events


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [64, 512])
def test_coalescing_changes_nothing_on_large_blocks_and_full_pools(seed: int, block_size: int) -> None:
    trace = random_trace(seed, 60, block_size)
    tight = SimulationPlan(num_workers=2, load=2.0, capacity=0.05)
    apart = SimulationPlan(num_workers=2, load=2.0, capacity=0.05, coalesce=False)
    together = finished(trace, tight)
    assert story(together) == story(finished(trace, apart))
    assert sum(worker.pool.num_evictions for worker in together.workers) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_seed_gives_one_report(policy: str) -> None:
    trace = load_trace(TRACES / "mooncake_small.jsonl")
    reports = []
    for _ in range(2):
        prepared = prepare(trace, BUSY)
        reports.append(report_of(prepared, BUSY, [run_policy(prepared, policy)]))
    assert reports[0] == reports[1]
    result = reports[0]["policies"][0]
    assert result["requests"] == 60
    assert result["failed"] == 0
    assert 0 <= result["hit_token_ratio"] <= result["ideal_hit_token_ratio"] < 1
    assert result["ttft_p50_s"] <= result["ttft_p90_s"] <= result["ttft_p99_s"] <= result["ttft_max_s"]


def test_the_gateway_predicts_what_the_worker_finds() -> None:
    trace = trace_of((1, 2, 3), (1, 2, 3, 4), (1, 2), gap_s=10.0)
    cluster = finished(trace, SimulationPlan(num_workers=2, load=None, capacity=10.0))
    assert [request.cached_tokens for request in cluster.requests] == [0, 48, 32]
    assert [request.predicted_tokens for request in cluster.requests] == [0, 48, 32]


def test_lost_events_are_found_and_mended_by_a_snapshot() -> None:
    trace = random_trace(3, 200, 64)
    plan = SimulationPlan(num_workers=2, load=0.5, capacity=0.3, event_loss_ratio=0.1)
    cluster = finished(trace, plan)
    gateway = cluster.gateways[0]
    assert gateway.num_gaps > 0
    assert all(request.ended_at is not None for request in cluster.requests)
    for worker in cluster.workers:  # a last snapshot, and belief equals the pool
        gateway.restart(worker.worker_id, 1 << 30, worker.pool.snapshot())
        assert gateway._index.num_blocks(worker.worker_id) == worker.pool.num_sealed


def test_two_replicas_share_the_work() -> None:
    cluster = finished(random_trace(5, 120, 64), SimulationPlan(num_workers=4, load=0.8, num_gateways=2))
    assert all(gateway._turn == 60 for gateway in cluster.gateways)
    assert not any(gateway._placed for gateway in cluster.gateways)


def test_with_one_ledger_each_replica_sees_what_the_other_books() -> None:
    trace = random_trace(5, 120, 64)
    apart = finished(trace, SimulationPlan(num_workers=4, load=0.8, num_gateways=2))
    joined = finished(trace, SimulationPlan(num_workers=4, load=0.8, num_gateways=2, shared_ledger=True))
    assert joined.gateways[0]._ledger is joined.gateways[1]._ledger
    assert apart.gateways[0]._ledger is not apart.gateways[1]._ledger
    assert all(load.num_inflight == 0 for load in joined.gateways[0]._ledger.loads().values())
    twins = prepare(trace_of((1, 2, 3), (1, 2, 3)),
                    SimulationPlan(num_workers=4, load=None, capacity=10.0, num_gateways=2, shared_ledger=True))
    cluster = Cluster(twins.trace, twins.settings, POLICIES["headstart"])
    first, second = cluster.requests
    chosen = cluster.gateways[0].route(first, 0.0).endpoint_id
    assert cluster.gateways[1]._index.match(second.hash_blocks(scheme_of(twins.trace)), 0.0)[chosen] == Match(0, 3)


def test_a_restart_storm_loses_caches_and_no_request() -> None:
    trace = random_trace(9, 200, 64)
    calm = finished(trace, SimulationPlan(num_workers=3, load=0.8, capacity=0.5))
    storm = finished(trace, SimulationPlan(num_workers=3, load=0.8, capacity=0.5, restart_storm=True, num_gateways=2))
    assert len(storm.retired) == 3
    assert all(request.ended_at is not None and not request.failed for request in storm.requests)
    assert not any(gateway._placed for gateway in storm.gateways)
    assert sum(request.cached_tokens for request in storm.requests) < sum(
        request.cached_tokens for request in calm.requests)
    for worker in storm.workers:
        worker.scheduler.check_invariants()
        for gateway in storm.gateways:  # nothing of the former life is believed
            assert gateway._index.num_blocks(worker.worker_id) <= worker.pool.num_sealed


def test_events_without_tokens_mean_what_the_workers_events_mean() -> None:
    """The same life of two pools, one told by hashes, one by the worker's events through the gateway's applier."""
    trace = random_trace(11, 120, 16)
    scheme, requests = scheme_of(trace), requests_of(trace)
    light, full = SimPool(40, scheme), BlockPool(40, 16, scheme)
    by_hash, by_event = PrefixIndex(1 << 30), PrefixIndex(1 << 30)
    applier = EventApplier(by_event, "w", scheme)
    for request in requests:
        for pool in (light, full):
            _occupy(pool, request.token_ids(), request.index)
        for change in light.journal.take_changes():
            if isinstance(change, Stored):
                assert by_hash.store("w", change.hashes, parent=change.parent) == len(change.hashes)
            elif isinstance(change, Removed):
                by_hash.remove("w", change.hashes)
        applier.apply_events(full.take_events())
        for other in requests:
            assert by_hash.match(other.hash_blocks(scheme), 0.0) == by_event.match(other.hashes, 0.0)
    assert full.num_evictions > 0
    assert isinstance(light.journal, HashJournal)


def _occupy(pool: BlockPool, tokens: list[int], seq_id: int) -> None:
    """As a scheduler would: match, take the rest, seal it, let go."""
    from worker.core.block_content import ContentChain

    chain = ContentChain(pool.scheme)
    chain.append(Sequence(seq_id, tokens, StopRule(1)).token_ids)
    table = pool.match(chain.blocks)
    fresh = pool.acquire(len(chain.blocks) - len(table))
    assert fresh is not None
    for block_id in fresh:
        held = pool.seal(block_id, chain.blocks[len(table)], parent=table[-1] if table else None)
        table.append(block_id if held is None else held)
    pool.release(table)


def random_fleet(draw: random.Random) -> tuple[PickInput, BusySteps]:
    """Up to 90 workers in any mood: idle, busy, full, unmeasured, holding some of the prompt."""
    views, loads, matches = [], {}, {}
    for number in range(draw.randint(2, 90)):
        name = f"w{number}"
        views.append(EndpointView(name, "e", block_size=64, prefill_tokens_per_s=draw.choice((3e4, 2e4, 0.0)),
                                  decode_step_s=draw.choice((0.01, 0.02, 0.0)), blocks_total=1000,
                                  blocks_free=draw.choice((0, 5, 500)), blocks_cached=draw.choice((0, 40, 400)),
                                  num_running=draw.randrange(6), num_waiting=draw.randrange(2),
                                  waiting_prefill_tokens=draw.choice((0, 0, 900)), running_prefill_tokens=0,
                                  decode_context_tokens=draw.choice((0, 9000)),
                                  step_tokens=draw.choice((0, 512, 32_768)),
                                  held_tokens_at_report=draw.choice((0, 3000, 60_000))))
        if draw.random() < 0.7:
            loads[name] = LoadView(draw.randrange(4), draw.choice((0, 0, 700)), draw.choice((0, 5000)),
                                   draw.randrange(4), draw.randrange(9000))
        if draw.random() < 0.3:
            matches[name] = Match(draw.randrange(40), draw.randrange(3))
    streams = {name: [Stream(draw.randrange(200, 3000), draw.randrange(900), 100,
                             draw.choice((None, draw.uniform(90, 100)))) for _ in range(load.num_inflight)]
               for name, load in loads.items()}
    steps = steps_seen(draw, views)
    return PickInput(views, draw.randint(1, 3000), matches, loads, random_ratio=draw.random(),
                     now=draw.uniform(100, 110), shared_ratio=draw.random(), stretch=draw.uniform(1, 4),
                     streams_of=lambda name: streams.get(name, ()), busy_step_of=steps.step_s,
                     unseen_requests=draw.choice((0.0, 0.0, draw.uniform(0.01, 3)))), steps


def steps_seen(draw: random.Random, views: list[EndpointView]) -> BusySteps:
    """By some of them, or by none."""
    steps, rates = BusySteps(), Rates(1e4, 0.02)
    for view in draw.choices(views, k=draw.choice((0, 1, 40))):
        expected = candidate_cost(view, NO_MATCH, LoadView(3, 900), Work(5000, 100), rates=rates)
        steps.saw(expected, draw.uniform(0.5, 4) * expected.first_token_s)
    return steps


def test_a_shortlist_changes_no_decision() -> None:
    num_whole = num_narrowed = 0
    for seed in range(300):
        given, steps = random_fleet(random.Random(seed))
        narrowed = Shortlist(given.endpoints, given.loads, steps).narrow(given)
        ours, whole = pick(structs.replace(given, endpoints=narrowed)), pick(given)
        assert not isinstance(ours, NoEndpoint)
        assert not isinstance(whole, NoEndpoint)
        assert (ours.endpoint_id, ours.matched_tokens) == (whole.endpoint_id, whole.matched_tokens)
        num_whole, num_narrowed = num_whole + len(given.endpoints), num_narrowed + len(narrowed)
    assert num_narrowed < num_whole / 3   # who waits for memory is not told apart before


def test_before_the_first_answers_have_ended_nobody_waits_while_others_idle() -> None:
    cluster = finished(WORKLOADS["llm_d"](60, 0), SimulationPlan(num_workers=200))
    assert all(request.first_token_at is not None and request.first_token_at - request.arrives_at < 1.0
               for request in cluster.requests)   # a pool holds one request at a time, for six seconds


def test_a_step_costs_what_it_computes() -> None:
    model = MODELS["h100-8b"]
    assert model.prefill_s(32_768) == pytest.approx(1.6, rel=0.05)  # as published
    assert model.decode_step_s(1, 0) < model.decode_step_s(64, 1000)
    assert model.prefill_s(8000, 7000) < model.prefill_s(8000) / 4
    cpu = MODELS["cpu-smollm2"]
    assert 1024 / cpu.prefill_s(1024) == pytest.approx(338, rel=0.05)
    assert 4096 / cpu.prefill_s(4096) == pytest.approx(214, rel=0.05)
    assert cpu.decode_step_s(1, 1024) == pytest.approx(0.065, rel=0.05)


HOT = trace_of(*([(*range(40), 100 + number) for number in range(120)]), gap_s=0.15, output_tokens=60)


def hot_run(**changes: object) -> Cluster:
    """A prefix that everybody asks for, in pools with room, at a light load."""
    return finished(HOT, replace(SimulationPlan(num_workers=4, load=None, capacity=20.0), **changes))


def test_hot_prefixes_are_copied_and_coalescing_changes_nothing_then() -> None:
    together, one_by_one = hot_run(), hot_run(coalesce=False)
    assert together.num_copies > 0
    assert story(together) == story(one_by_one)
    for ours, theirs in zip(together.workers, one_by_one.workers, strict=True):
        assert ours.scheduler.counters == theirs.scheduler.counters
    assert hot_run(copies_ahead=False).num_copies == 0
    assert finished(HOT, SimulationPlan(num_workers=4, load=None, capacity=20.0), "round_robin").num_copies == 0


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_no_worker_is_given_one_copy_twice_and_what_was_booked_is_given_back(num_gateways: int) -> None:
    cluster = hot_run(num_gateways=num_gateways, shared_ledger=True)
    assert 0 < cluster.num_copies <= len(cluster.workers) - 1, "all want the same copies at the same looks"
    while cluster._copying:
        cluster.clock.step()
    assert all(load.num_inflight == 0 for load in cluster.gateways[0]._ledger.loads().values())


def test_copies_of_a_worker_that_is_replaced_are_forgotten() -> None:
    cluster = hot_run(restart_storm=True)
    assert cluster.num_copies > 0
    assert all(request.ended_at is not None for request in cluster.requests)


@given(st.lists(st.tuples(st.sampled_from([0, 0, 1, 31, 32, 500]), st.integers(0, 40),
                          st.floats(1e-4, 10.0), st.sampled_from([0.0, 1.0, 12.0, 100.0])), max_size=60))
def test_simulated_workers_learn_their_rates_by_the_workers_formula(
        steps: list[tuple[int, int, float, float]]) -> None:
    cluster = Cluster(trace_of((1,)), ClusterSettings(num_workers=1), POLICIES["round_robin"])
    simulated, rates = cluster.workers[0], EngineRates()
    rates.observe(prefill_tokens=WARM_UP_TOKENS, decode_rows=0, step_s=simulated.model.prefill_s(WARM_UP_TOKENS))
    rates.observe(prefill_tokens=0, decode_rows=1, step_s=simulated.model.decode_step_s(1, WARM_UP_TOKENS))
    for prefill_tokens, decode_rows, step_s, pause_s in steps:
        cluster.clock.now += pause_s + step_s
        if prefill_tokens or decode_rows:
            simulated._learn(prefill_tokens, decode_rows, step_s)
            rates.observe(prefill_tokens=prefill_tokens, decode_rows=decode_rows, step_s=step_s,
                          at=cluster.clock.now)
    report = simulated.report()
    assert report.prefill_tokens_per_s == pytest.approx(rates.prefill_tokens_per_s)
    assert report.decode_step_s == pytest.approx(rates.decode_step_s)


SHARING = SimulationPlan(num_workers=4, load=0.9, capacity=4.0, workers_per_machine=4, cores_per_machine=2)


def conversations(num: int, turns: int) -> Trace:
    """Behind one long beginning, each turn longer than the last, in an order that mixes them."""
    draw = random.Random(3)
    left = [number for number in range(num) for _ in range(turns)]
    draw.shuffle(left)
    said: list[tuple[int, ...]] = [tuple(range(60))] * num
    prompts = []
    for place, number in enumerate(left):
        said[number] = (*said[number], *range(1000 + 8 * place, 1008 + 8 * place))
        prompts.append(said[number])
    return trace_of(*prompts, output_tokens=16)


CONVERSATIONS = conversations(30, 6)


def test_workers_that_share_cores_slow_each_other_and_with_a_core_each_they_do_not() -> None:
    apart = finished(CONVERSATIONS, SimulationPlan(num_workers=4, load=0.9, capacity=4.0, coalesce=False))
    assert story(finished(CONVERSATIONS, replace(SHARING, cores_per_machine=4))) == story(apart)
    at_once = replace(CONVERSATIONS, requests=tuple(replace(one, at_s=0.0) for one in CONVERSATIONS.requests))
    shared, own = (finished(at_once, replace(SHARING, load=None, cores_per_machine=cores), "round_robin")
                   for cores in (1, 4))
    assert shared.clock.now > 3.5 * own.clock.now


def test_shared_cores_are_known_to_gateways_so_that_fewer_workers_do_the_same() -> None:
    prepared = prepare(CONVERSATIONS, SHARING)
    knowing, blind = (Cluster(prepared.trace, prepared.settings, POLICIES["headstart"]) for _ in range(2))
    blind.gateways[0]._core_sets = ()
    for cluster in (knowing, blind):
        cluster.run()
    computed = [sum(request.prompt_tokens - request.cached_tokens for request in cluster.requests)
                for cluster in (knowing, blind)]
    assert computed[0] < computed[1]
    first_tokens = [sum(request.first_token_at - request.arrives_at for request in cluster.requests
                        if request.first_token_at is not None) for cluster in (knowing, blind)]
    assert first_tokens[0] < 0.9 * first_tokens[1]
