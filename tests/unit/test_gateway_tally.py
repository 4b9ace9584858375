"""Counters and histograms as Prometheus reads them, beside the client library's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gateway.server.tally import Buckets, Tally

BOUNDS = (0.001, 0.5, 1, 10)
VALUES = st.one_of(st.floats(0, 20, allow_nan=False), st.sampled_from([*map(float, BOUNDS), 11.0]))


def exposed(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 5))))
def test_a_tally_is_a_counter(counted: list[tuple[str, str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("things", "Things.", ["one", "two"])
    ours.register(tally)
    counter = Counter("things", "Things.", ["one", "two"], registry=theirs)
    for one, two, amount in counted:
        tally.add((one, two), amount)
        counter.labels(one, two).inc(amount)

    assert exposed(ours) == exposed(theirs)


@given(st.lists(st.tuples(st.sampled_from("ab"), VALUES)))
def test_buckets_are_a_histogram(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine, bare = Buckets("waits", "Waits.", BOUNDS, ["kind"]), Buckets("all", "All.", BOUNDS)
    ours.register(mine)
    ours.register(bare)
    histogram = Histogram("waits", "Waits.", ["kind"], buckets=BOUNDS, registry=theirs)
    total = Histogram("all", "All.", buckets=BOUNDS, registry=theirs)
    for kind, value in observed:
        mine.observe(value, (kind,))
        bare.observe(value)
        histogram.labels(kind).observe(value)
        total.observe(value)

    assert exposed(ours) == exposed(theirs)


def test_a_forgotten_label_value_leaves_the_others() -> None:
    tally, registry = Tally("things", "Things.", ["worker", "reason"]), CollectorRegistry()
    registry.register(tally)
    for worker in ("a", "b"):
        tally.add((worker, "prefix"), 2)

    tally.forget("worker", "a")

    assert registry.get_sample_value("things_total", {"worker": "a", "reason": "prefix"}) is None
    assert registry.get_sample_value("things_total", {"worker": "b", "reason": "prefix"}) == pytest.approx(2)
