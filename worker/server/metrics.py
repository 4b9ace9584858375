"""The worker's Prometheus metrics (contract section 6), its own names and vLLM's.

Two sources: the engine's cumulative counters and present state (EngineStats, read when scraped, never summed twice)
and the durations that pass by once (steps, phases of a request), kept here in histograms. Labels are bounded: no
request, user or prompt ever becomes one.
"""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from worker.engine.messages import EngineReady, EngineStats, SequenceStats, StepReport
from worker.server.engine_collector import EngineCollector

PHASES = ("tokenize", "queue", "allocate", "prefill", "recompute", "sample")
BUSY_WINDOW_S = 10.0
BUSY_STEPS_MAX = 20_000
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerMetrics:
    """`observe_*` as things happen, `render` for a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = Histogram("headstart_worker_ttft_seconds", "Time to first token by phase.", ["phase"],
                               buckets=_SECONDS, registry=self.registry)
        self._step = Histogram("headstart_worker_step_seconds", "Duration of one engine step.", ["kind"],
                               buckets=_SECONDS, registry=self.registry)
        self._overhead = Counter("headstart_worker_step_overhead_seconds",
                                 "Time between two runs of the model while there was work.", ["kind"],
                                 registry=self.registry)
        self._batch = Histogram("headstart_worker_batch_size", "Sequences in one engine step.", buckets=_BATCH,
                                registry=self.registry)
        self._disconnects = Counter("headstart_worker_client_disconnects_total", "Clients that left before the end.",
                                    registry=self.registry)
        self._busy = BusyWindow()
        self._engine = EngineCollector(lambda: self._busy.ratio(time.monotonic()))
        self.registry.register(self._engine)
        for phase in PHASES:
            self._ttft.labels(phase)

    def observe_ready(self, ready: EngineReady, stats: EngineStats) -> None:
        """What the model is, and the state before the first step."""
        self._engine.ready, self._engine.stats = ready, stats

    def observe_step(self, report: StepReport) -> None:
        """A step's duration and size, and the state after it."""
        self._engine.stats = report.stats
        if report.batch_size:
            self._step.labels(report.step_kind).observe(report.step_s)
            self._overhead.labels(report.step_kind).inc(report.overhead_s)
            self._batch.observe(report.batch_size)
            self._busy.add(time.monotonic(), report.step_s)

    def observe_sequence(self, stats: SequenceStats) -> None:
        """A released sequence's phases. Recomputation counts only where there was some."""
        for phase, seconds in stats.phases.items():
            if phase in PHASES and (seconds > 0 or phase != "recompute"):
                self._ttft.labels(phase).observe(seconds)

    def observe_tokenize(self, seconds: float) -> None:
        self._ttft.labels("tokenize").observe(seconds)

    def observe_disconnect(self) -> None:
        self._disconnects.inc()

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)


class BusyWindow:
    """The share of the last BUSY_WINDOW_S seconds in which a step ran. Clock values come in."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=BUSY_STEPS_MAX)

    def add(self, ended_at: float, step_s: float) -> None:
        self._steps.append((ended_at, step_s))
        self._forget_before(ended_at - BUSY_WINDOW_S)

    def ratio(self, now: float) -> float:
        """In [0, 1]; a step that began before the window counts with the part inside it."""
        start = now - BUSY_WINDOW_S
        self._forget_before(start)
        busy_s = sum(min(step_s, ended_at - start) for ended_at, step_s in self._steps)
        return min(1.0, busy_s / BUSY_WINDOW_S)

    def _forget_before(self, start: float) -> None:
        while self._steps and self._steps[0][0] <= start:
            self._steps.popleft()
