"""The gateway's Prometheus metrics (contract section 6).

Owns: the registry, every counter of finished requests, and the gauges read from the live tables at scrape time: those
of a worker that is gone are gone with it.
Must never: take a label from a request that the configuration or the workers do not bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.knowledge.endpoint_table import Endpoint, EndpointTable
from gateway.routing.endpoint import Knowledge
from gateway.routing.load_ledger import LoadLedger
from gateway.routing.prefix_index import PrefixIndex
from gateway.server.request_record import RequestRecord
from gateway.server.tally import Buckets, Sum, Tally

T = TypeVar("T")
OTHER = "other"
LEAST_EXPECTED_S = 1e-4
READ_RETRIES_MAX = 3
COUNTING_MAX_S = 0.1
LOOP_LAG_INTERVAL_S = 0.5
_LATENCY_BUCKETS = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STAGE_BUCKETS = (.00001, .00003, .0001, .0003, .001, .003, .01, .03, .1, .3, 1, 3)
_RATIO_BUCKETS = (.1, .25, .5, .7, .8, .9, 1.1, 1.25, 1.5, 2, 4, 10)
_TOKEN_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384)


class GatewayMetrics:
    """`observe()` at the end of each request; `render()` at each scrape."""

    def __init__(self, table: EndpointTable, index: PrefixIndex, ledger: LoadLedger) -> None:
        self._table = table
        loop = self._loop = asyncio.get_running_loop()  # other threads read the metrics as well
        self._thread_id, self._context = threading.get_ident(), contextvars.copy_context()
        self.before_read: Callable[[], None] = _nothing  # counts what has ended and is not counted yet
        registry = self._registry = CollectorRegistry()
        self._state = _StateCollector(table, index, ledger)
        registry.register(self._state)
        self._requests = Tally("headstart_requests", "Requests answered.", ["route", "model", "code"])
        self._ttft = Buckets("headstart_time_to_first_token_seconds", "Request to first body byte.", _LATENCY_BUCKETS)
        self._inter_token = Buckets("headstart_inter_token_seconds", "Mean gap between a stream's tokens.",
                                    _LATENCY_BUCKETS)
        self._duration = Buckets("headstart_request_duration_seconds", "Request to last byte.", _LATENCY_BUCKETS)
        self._overhead = Buckets("headstart_overhead_seconds", "Time spent in the gateway before sending upstream.",
                                 _STAGE_BUCKETS, ["stage"])
        self._prompt_tokens = Tally("headstart_prompt_tokens", "Prompt tokens of requests that a worker took.",
                                    ["model"])
        self._cached_tokens = Tally("headstart_cached_tokens", "Prompt tokens found in a worker's cache.",
                                    ["model", "source"])
        self._hit_error = Buckets("headstart_hit_error_tokens", "Distance of the reported from the predicted hit.",
                                  _TOKEN_BUCKETS, ["direction"])
        self._ttft_error = Buckets("headstart_first_token_observed_to_predicted_ratio",
                                   "Streams' time from the choice of a worker to its first token, over what was "
                                   "predicted.", _RATIO_BUCKETS)
        self._decisions = Tally("headstart_decisions", "Where requests went, and why.", ["worker", "reason"])
        self._session_cached = Tally("headstart_session_cached_tokens", "Of those cacheable, found.")
        self._session_cacheable = Tally("headstart_session_cacheable_tokens",
                                        "Known prefix tokens of requests that continue one.")
        self._express = Tally("headstart_express_requests", "Requests that took the express lane, and how they left.",
                              ["outcome"])
        registry.register(self._express)
        for collector in (self._requests, self._ttft, self._inter_token, self._duration, self._overhead,
                          self._prompt_tokens, self._cached_tokens, self._hit_error, self._ttft_error,
                          self._decisions, self._session_cached, self._session_cacheable):
            registry.register(collector)
        self._series_of: dict[tuple[str, str, int, str | None, str | None], list[Sum]] = {}  # bounded as those are
        self._tokens_of: dict[str, tuple[Sum, Sum, Sum]] = {}
        Gauge("headstart_session_hit_ratio", "Cached / cacheable prompt tokens of requests that continue "
              "a known prefix, with a session's name or without.", registry=registry
              ).set_function(self._session_hit_ratio)
        self._retries = Counter("headstart_retries", "Attempts repeated on another worker.", ["reason"],
                                registry=registry)
        self._migrations = Counter("headstart_migrations", "Streams that lost their worker, and what became of them.",
                                   ["outcome"], registry=registry)
        self._hedges = Counter("headstart_hedges", "Streams asked of a second worker, and who began first.",
                               ["outcome"], registry=registry)
        self._rejected = Counter("headstart_rejected", "Requests refused, by the gateway or by full workers.",
                                 ["reason"], registry=registry)
        self._queue_depth = Gauge("headstart_queue_depth", "Requests that wait for a worker to have a place.",
                                  registry=registry)
        self._broken_streams = Counter("headstart_broken_streams", "Streams that ended without [DONE].",
                                       ["reason"], registry=registry)
        self._disconnects = Counter("headstart_client_disconnects", "Clients that left early.", registry=registry)
        self.loop_lag = Gauge("headstart_event_loop_lag_seconds", "How late the event loop last ran a timer.",
                              registry=registry)

        Gauge("headstart_event_loop_tasks", "Tasks of the event loop; as few as before when all requests have ended.",
              registry=registry).set_function(lambda: len(asyncio.all_tasks(loop)))

    def reject(self, reason: str) -> None:
        """Count a connection that was cut before it became a request."""
        self._rejected.labels(reason).inc()

    def express(self, outcome: str) -> None:
        """Count one request that took the express lane: answered, refused, left or handed_over."""
        self._express.add((outcome,))

    def migrated(self, outcome: str) -> None:
        """Count one stream (one choice of it) that lost its worker."""
        self._migrations.labels(outcome).inc()

    def hedged(self, outcome: str) -> None:
        """Count one stream that had not begun in time."""
        self._hedges.labels(outcome).inc()

    def add(self, collector: Collector) -> None:
        """Have another part's figures read at every scrape."""
        self._registry.register(collector)

    def watch_queue(self, num_waiting: Callable[[], int]) -> None:
        """Where to read how many requests wait for a worker."""
        self._queue_depth.set_function(num_waiting)

    def watch_breakers(self, states: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Where to read the workers' breakers."""
        self._state.breaker_states = states

    def render(self) -> bytes:
        """The exposition text. Any thread may ask."""
        self._count_all()
        return self._unchanged(lambda: generate_latest(self._registry))

    def snapshot(self) -> bytes:
        """Every series as JSON, for the sum over several processes. Any thread may ask."""
        self._count_all()
        return orjson.dumps(self._unchanged(lambda: [
            [family.name, family.type, family.documentation,
             [[sample.name, sample.labels, sample.value] for sample in family.samples]]
            for family in self._registry.collect()]))

    def _count_all(self) -> None:
        """From another thread: by the event loop, unless that is stuck."""
        if threading.get_ident() == self._thread_id:
            self.before_read()
            return
        counted = threading.Event()

        def count() -> None:
            self.before_read()
            counted.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(count, context=self._context)  # whose log lines say which process
            counted.wait(COUNTING_MAX_S)

    def _unchanged(self, read: Callable[[], T]) -> T:
        """The event loop may change a table under another thread's eyes: that one looks again."""
        for _ in range(READ_RETRIES_MAX):
            with contextlib.suppress(RuntimeError):
                return read()
        return read()

    def observe(self, record: RequestRecord, duration_s: float) -> None:
        """Count one finished request."""
        model = self.model_label(record.model)
        kind = (record.route, model, record.status, record.worker_id, record.reason)
        for series in self._series_of.get(kind) or self._count_as(kind):
            series[0] += 1.0
        self._duration.observe(duration_s)
        self._overhead.observe_each(record.stages)
        for reason in record.retries:
            self._retries.labels(reason).inc()
        if record.outcome == "client_left":
            self._disconnects.inc()
        if record.error is not None and (record.worker_id is None or record.status == 429):
            self._rejected.labels(record.rejected or record.error).inc()
        if record.ttft_s is not None and record.admitted:
            self._observe_answer(record, model, record.ttft_s)

    def _count_as(self, kind: tuple[str, str, int, str | None, str | None]) -> list[Sum]:
        """The series in which such requests are counted, each once."""
        route, model, status, worker_id, reason = kind
        series = self._series_of[kind] = [self._requests.sum_of((route, model, str(status)))]
        if worker_id is not None and reason is not None:
            series.append(self._decisions.sum_of((worker_id, reason)))
        return series

    def _observe_answer(self, record: RequestRecord, model: str, ttft_s: float) -> None:
        if record.status == 200:
            self._ttft.observe(ttft_s)
        first_token_s, expected = record.first_token_s, record.expected
        if first_token_s is not None and expected is not None and expected.endpoint_id == record.worker_id:
            self._ttft_error.observe(first_token_s / max(expected.first_token_s, LEAST_EXPECTED_S))
        if record.stream and record.outcome == "worker_error":
            self._broken_streams.labels(record.error or OTHER).inc()
        if record.inter_token_s is not None:
            self._inter_token.observe(record.inter_token_s)
        prompt, predicted, reported = self._tokens_of.get(model) or self._count_tokens_of(model)
        prompt[0] += record.prompt_tokens or 0
        predicted[0] += record.matched_tokens or 0
        reported[0] += record.cached_tokens or 0
        if record.cacheable_tokens and record.cached_tokens is not None:
            self._session_cached.sum_of(())[0] += min(record.cached_tokens, record.cacheable_tokens)
            self._session_cacheable.sum_of(())[0] += record.cacheable_tokens
        error = record.hit_error_tokens()
        if error is not None and error != 0:
            self._hit_error.observe(abs(error), ("over" if error > 0 else "under",))

    def _count_tokens_of(self, model: str) -> tuple[Sum, Sum, Sum]:
        self._tokens_of[model] = sums = (self._prompt_tokens.sum_of((model,)),
                                         self._cached_tokens.sum_of((model, "predicted")),
                                         self._cached_tokens.sum_of((model, "reported")))
        return sums

    def _session_hit_ratio(self) -> float:
        (cached,), (cacheable,) = self._session_cached.sum_of(()), self._session_cacheable.sum_of(())
        return cached / cacheable if cacheable else math.nan

    def model_label(self, model: str | None) -> str:
        """The model's name if a worker serves it, else `other`: clients cannot make series."""
        return model if model is not None and self._table.knows(model) else OTHER

    def forget_worker(self, worker_id: str) -> None:
        """Drop the series of a worker that was removed."""
        self.before_read()  # or what it answered would be counted after
        self._decisions.forget("worker", worker_id)
        self._series_of.clear()


def _nothing() -> None:
    """What there is to count before requests are served."""


class _StateCollector(Collector):
    """What the tables say right now."""

    def __init__(self, table: EndpointTable, index: PrefixIndex, ledger: LoadLedger) -> None:
        self._table = table
        self._index = index
        self._ledger = ledger
        self.breaker_states: Callable[[], Iterable[tuple[str, int]]] = tuple

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("headstart_index_blocks", "Blocks in the prefix index.",
                                value=self._index.num_blocks())
        yield GaugeMetricFamily("headstart_index_bytes", "Memory of the prefix index.",
                                value=self._index.memory_bytes())
        yield self._knowledge()
        yield self._breakers()
        yield self._gauge("headstart_inflight", "Requests under way.",
                          lambda e: self._ledger.load(e.endpoint_id).num_inflight)
        yield self._gauge("headstart_index_lag_seconds", "Age of the last event when it was applied.",
                          lambda e: e.feed.lag_s)
        yield self._gauge("headstart_endpoint_blocks", "Blocks that the index believes this worker holds.",
                          lambda e: self._index.num_blocks(e.endpoint_id))
        yield self._gauge("headstart_endpoint_blocks_max", "Blocks of the worker's pool.",
                          lambda e: e.report.blocks.total if e.report is not None else 0)
        yield self._gauge("headstart_endpoint_kv_usage_ratio", "Share of the pool that running requests hold.",
                          lambda e: e.kv_usage_ratio)
        yield self._counter("headstart_event_gaps", "Holes found in the worker's events.", lambda e: e.feed.num_gaps)
        yield self._counter("headstart_event_resyncs", "Snapshots taken.", lambda e: e.feed.num_resyncs)
        yield self._counter("headstart_event_decode_errors", "Event messages that could not be read.",
                            lambda e: e.feed.num_undecodable)
        yield self._counter("headstart_endpoint_evicted_blocks", "Blocks that the worker said it removed.",
                            lambda e: e.feed.num_evicted_blocks)

    def _knowledge(self) -> Metric:
        family = GaugeMetricFamily("headstart_knowledge", "1 for the level that applies.", labels=["worker", "level"])
        for endpoint in self._table:
            for level in Knowledge:
                family.add_metric([endpoint.endpoint_id, level.value], float(endpoint.knowledge is level))
        return family

    def _breakers(self) -> Metric:
        family = GaugeMetricFamily("headstart_breaker_state", "0 closed, 1 half open, 2 open.", labels=["worker"])
        for worker_id, state in self.breaker_states():
            family.add_metric([worker_id], float(state))
        return family

    def _gauge(self, name: str, text: str, value: Callable[[Endpoint], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for endpoint in self._table:
            family.add_metric([endpoint.endpoint_id], value(endpoint))
        return family

    def _counter(self, name: str, text: str, value: Callable[[Endpoint], float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["worker"])
        for endpoint in self._table:
            family.add_metric([endpoint.endpoint_id], value(endpoint))
        return family


async def measure_loop_lag(gauge: Gauge) -> None:
    """How late a timer fires tells how long others hold the loop. Runs for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + LOOP_LAG_INTERVAL_S
        await asyncio.sleep(LOOP_LAG_INTERVAL_S)
        gauge.set(max(0.0, loop.time() - due_at))
