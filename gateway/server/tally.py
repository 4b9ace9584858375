"""Counters and histograms that cost a request next to nothing: plain dicts on the event loop, rendered at a scrape.

Owns: the sums. One writer, the event loop; the client library's own metrics take a lock and look labels up for every
count. Must never: take a label that the caller has not bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]
Sum = list[float]


class Tally(Collector):
    """A counter with labels, by their values in the order of `labels`. Without labels it is there from the start."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._text, self._labels = name, text, list(labels)
        self._sums: dict[Labels, Sum] = {}
        if not labels:
            self.sum_of(())

    def add(self, labels: Labels = (), amount: float = 1.0) -> None:
        """Count."""
        (self._sums.get(labels) or self.sum_of(labels))[0] += amount

    def sum_of(self, labels: Labels) -> Sum:
        """The one number of a series, for whoever adds to it again and again, until it is forgotten."""
        return self._sums.setdefault(labels, [0.0])

    def forget(self, label: str, value: str) -> None:
        """Drop every series with this value of this label."""
        at = self._labels.index(label)
        self._sums = {labels: total for labels, total in self._sums.items() if labels[at] != value}

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, (total,) in self._sums.items():
            family.add_metric(labels, total)
        yield family


class Buckets(Collector):
    """A histogram; `bounds` ascend, the infinite one is added."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, list(labels), tuple(bounds)
        self._cells: dict[Labels, list[float]] = {}  # a count for each bucket, and the sum of the values behind them
        if not labels:
            self._open(())

    def observe(self, value: float, labels: Labels = ()) -> None:
        """Count one value in its bucket: the first whose bound it does not exceed."""
        cells = self._cells.get(labels) or self._open(labels)
        cells[bisect_left(self._bounds, value)] += 1
        cells[-1] += value

    def observe_each(self, values: Mapping[str, float]) -> None:
        """observe() each value under its one label."""
        bounds, known = self._bounds, self._cells
        for label, value in values.items():
            cells = known.get((label,)) or self._open((label,))
            cells[bisect_left(bounds, value)] += 1
            cells[-1] += value

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(repr, map(float, self._bounds)), "+Inf"]
        for labels, (*counts, total) in self._cells.items():
            cumulative = accumulate(map(float, counts))
            family.add_metric(labels, [*zip(names, cumulative, strict=True)], total)
        yield family

    def _open(self, labels: Labels) -> list[float]:
        cells = self._cells[labels] = [0.0] * (len(self._bounds) + 2)
        return cells
