"""What the supervisor itself counts: how many processes work, and how often one was started again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


def own_metrics(num_living: int, num_restarts: Mapping[str, int]) -> Iterator[Metric]:
    """As metric families."""
    yield GaugeMetricFamily("headstart_processes", "Processes of this gateway that work.", value=num_living)
    restarts = CounterMetricFamily("headstart_process_restarts", "Processes started again.", labels=["reason"])
    for reason, count in num_restarts.items():
        restarts.add_metric([reason], count)
    yield restarts
