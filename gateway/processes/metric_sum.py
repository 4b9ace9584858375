"""Metrics of several processes as those of one gateway.

Owns: how each kind of series is put together, and what ended processes had counted. Snapshots come in as values.
Counters and histograms are summed, with those of processes that are no more, so that they never go back. Gauges say
the same in every process or are at their worst in one (the greatest), except those that are parts of a whole (the
sum). What each process counts of the same happening is not summed.
Known approximation: what a killed process counted since it was last asked, a second at most, is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Snapshot = list[list[Any]]
Series = tuple[str, tuple[tuple[str, str], ...]]
SUMMED_GAUGES = ("headstart_queue_depth", "headstart_index_bytes", "headstart_event_loop_tasks")
# Every process sees the same events of the same workers.
SEEN_BY_EACH = ("headstart_endpoint_evicted_blocks",)
# Best first: the whole knows a worker as well as the process that knows it worst.
KNOWLEDGE, LEVELS = "headstart_knowledge", ("exact", "approximate", "none")
HIT_RATIO, HIT_PARTS = "headstart_session_hit_ratio", ("headstart_session_cached_tokens_total",
                                                       "headstart_session_cacheable_tokens_total")
_WORKERS = "headstart_inflight"
_CREATED = "_created"


class MetricSum:
    """Snapshots of living processes by row, and the sums of those that have ended."""

    def __init__(self) -> None:
        self._living: dict[int, Snapshot] = {}
        self._ended: dict[str, dict[Series, float]] = {}

    def put(self, row: int, snapshot: Snapshot) -> None:
        """What the process of this row says now."""
        self._living[row] = snapshot

    def end(self, row: int) -> None:
        """The process of this row has ended: what it counted stays, its gauges go."""
        for name, kind, _, samples in self._living.pop(row, []):
            if kind in ("counter", "histogram") and name not in SEEN_BY_EACH:
                _add(self._ended.setdefault(name, {}), samples)

    def families(self) -> list[Metric]:
        """Every family once."""
        heads = {name: (kind, text) for snapshot in self._living.values() for name, kind, text, _ in snapshot}
        merged: dict[str, dict[Series, float]] = {}
        for name, (kind, _) in heads.items():
            parts = [samples for snapshot in self._living.values() for other, _, _, samples in snapshot
                     if other == name]
            merged[name] = self._merge(name, kind, parts)
        workers = {labels for _, labels in merged.get(_WORKERS, {})}
        families = []
        for name, (kind, text) in heads.items():
            family = Metric(name, text, kind)
            values = merged[name] if name != HIT_RATIO else _ratio(merged)
            for (sample, labels), value in values.items():
                if not workers or _worker_of(labels) in (None, *map(_worker_of, workers)):
                    family.add_sample(sample, dict(labels), value)
            families.append(family)
        return families

    def _merge(self, name: str, kind: str, parts: list[list[Any]]) -> dict[Series, float]:
        if kind in ("counter", "histogram") and name not in SEEN_BY_EACH:
            total = dict(self._ended.get(name, {}))
            for samples in parts:
                _add(total, samples)
            return total
        if name in SUMMED_GAUGES:
            total = {}
            for samples in parts:
                _add(total, samples)
            return total
        greatest: dict[Series, float] = {}
        for series, value in _series(sample for samples in parts for sample in samples):
            greatest[series] = max(greatest.get(series, -math.inf), value)
        return _worst_knowledge(greatest) if name == KNOWLEDGE else greatest


def exposition(families: Iterable[Metric]) -> bytes:
    """The text for Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _series(samples: Iterable[Any]) -> Iterator[tuple[Series, float]]:
    for sample, labels, value in samples:
        if not sample.endswith(_CREATED):
            yield (sample, tuple(sorted(labels.items()))), math.nan if value is None else value


def _add(total: dict[Series, float], samples: Iterable[Any]) -> None:
    for series, value in _series(samples):
        total[series] = total.get(series, 0.0) + value


def _worst_knowledge(values: Mapping[Series, float]) -> dict[Series, float]:
    worst: dict[str | None, int] = {}
    for (_, labels), value in values.items():
        if value:
            worker = _worker_of(labels)
            worst[worker] = max(worst.get(worker, 0), LEVELS.index(dict(labels)["level"]))
    return {(sample, labels): float(LEVELS.index(dict(labels)["level"]) == worst.get(_worker_of(labels)))
            for sample, labels in values}


def _ratio(merged: Mapping[str, Mapping[Series, float]]) -> dict[Series, float]:
    cached, cacheable = (merged.get(name.removesuffix("_total"), {}).get((name, ()), 0.0) for name in HIT_PARTS)
    return {(HIT_RATIO, ()): cached / cacheable if cacheable else math.nan}


def _worker_of(labels: tuple[tuple[str, str], ...]) -> str | None:
    return dict(labels).get("worker")
