"""Metrics of several processes as those of one: sums that never go back, gauges that say something."""

from __future__ import annotations

import math
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.processes.metric_sum import MetricSum, exposition


class Process:
    """One process's registry, with a few families as the gateway has them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("headstart_requests", "Requests.", ["code"], registry=self.registry)
        self.decisions = Counter("headstart_decisions", "Where to.", ["worker"], registry=self.registry)
        self.evicted = Counter("headstart_endpoint_evicted_blocks", "Seen.", ["worker"], registry=self.registry)
        self.duration = Histogram("headstart_request_duration_seconds", "Took.", buckets=(1, 2),
                                  registry=self.registry)
        self.inflight = Gauge("headstart_inflight", "Under way.", ["worker"], registry=self.registry)
        self.queue = Gauge("headstart_queue_depth", "Waiting.", registry=self.registry)
        self.knowledge = Gauge("headstart_knowledge", "Level.", ["worker", "level"], registry=self.registry)
        self.cached = Counter("headstart_session_cached_tokens", "Found.", registry=self.registry)
        self.cacheable = Counter("headstart_session_cacheable_tokens", "Could be.", registry=self.registry)
        self.ratio = Gauge("headstart_session_hit_ratio", "Ratio.", registry=self.registry)
        self.inflight.labels("w").set(0)

    def knows(self, level: str) -> None:
        for each in ("exact", "approximate", "none"):
            self.knowledge.labels("w", each).set(each == level)

    def snapshot(self) -> list[Any]:
        """As it travels: JSON there and back."""
        return list(orjson.loads(orjson.dumps([
            [family.name, family.type, family.documentation,
             [[sample.name, sample.labels, sample.value] for sample in family.samples]]
            for family in self.registry.collect()])))


def series(whole: MetricSum) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(exposition(whole.families()).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_counters_and_histograms_are_summed_and_survive_their_process() -> None:
    first, second, whole = Process(), Process(), MetricSum()
    first.requests.labels("200").inc(5)
    second.requests.labels("200").inc(7)
    second.requests.labels("429").inc(1)
    first.duration.observe(1.5)
    second.duration.observe(0.5)
    whole.put(0, first.snapshot())
    whole.put(1, second.snapshot())
    before = series(whole)
    assert before["headstart_requests_total{code=200}"] == 12
    assert before["headstart_requests_total{code=429}"] == 1
    assert before["headstart_request_duration_seconds_bucket{le=1.0}"] == 1
    assert before["headstart_request_duration_seconds_count"] == before[
        "headstart_request_duration_seconds_bucket{le=+Inf}"] == 2
    whole.end(1)
    whole.end(1)
    third = Process()
    third.requests.labels("200").inc(1)
    whole.put(1, third.snapshot())
    after = series(whole)
    assert after["headstart_requests_total{code=200}"] == 13
    assert all(after[name] >= value for name, value in before.items() if name.startswith("headstart_request"))


def test_gauges_are_the_greatest_or_a_sum_where_they_are_parts() -> None:
    first, second, whole = Process(), Process(), MetricSum()
    for process, inflight, waiting in ((first, 9, 2), (second, 8, 3)):
        process.inflight.labels("w").set(inflight)  # each says it of all, at its own instant
        process.queue.set(waiting)
        process.evicted.labels("w").inc(100 + waiting)
    first.knows("exact")
    second.knows("approximate")
    whole.put(0, first.snapshot())
    whole.put(1, second.snapshot())
    found = series(whole)
    assert found["headstart_inflight{worker=w}"] == 9
    assert found["headstart_queue_depth"] == 5
    assert found["headstart_endpoint_evicted_blocks_total{worker=w}"] == 103
    levels = [found[f"headstart_knowledge{{level={level},worker=w}}"] for level in ("exact", "approximate", "none")]
    assert levels == [0, 1, 0]
    whole.end(1)
    assert series(whole)["headstart_queue_depth"] == 2


def test_the_hit_ratio_is_of_the_sums() -> None:
    first, second, whole = Process(), Process(), MetricSum()
    first.ratio.set(math.nan)
    whole.put(0, first.snapshot())
    assert math.isnan(series(whole)["headstart_session_hit_ratio"])
    second.cached.inc(90)
    second.cacheable.inc(100)
    second.ratio.set(0.9)
    first.cacheable.inc(100)
    first.ratio.set(0.0)
    whole.put(0, first.snapshot())
    whole.put(1, second.snapshot())
    assert series(whole)["headstart_session_hit_ratio"] == 0.45


def test_series_of_a_worker_that_is_gone_go_although_they_were_counted() -> None:
    first, second, whole = Process(), Process(), MetricSum()
    first.decisions.labels("gone").inc()
    first.decisions.labels("w").inc()
    whole.put(0, first.snapshot())
    whole.end(0)
    whole.put(0, second.snapshot())
    second.decisions.labels("w").inc(2)
    whole.put(0, second.snapshot())
    found = series(whole)
    assert found["headstart_decisions_total{worker=w}"] == 3
    assert not [name for name in found if "gone" in name]


def test_one_process_alone_reads_as_it_would_have() -> None:
    process, whole = Process(), MetricSum()
    process.requests.labels("200").inc(5)
    process.duration.observe(1.5)
    process.knows("exact")
    process.ratio.set(math.nan)
    whole.put(0, process.snapshot())

    def lines(text: bytes) -> list[str]:
        return sorted(line for line in text.decode().splitlines() if "_created" not in line)

    assert lines(exposition(whole.families())) == lines(generate_latest(process.registry))
