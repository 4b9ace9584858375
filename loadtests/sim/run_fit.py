"""A cost model from live runs: what requests waited for is the sum of the steps that they lived through.

Owns the equations. Which steps those were the simulator says, with each request at the worker that it really went to;
so every round simulates with the model of the round before, and fits anew. It must never measure.

One request's wait hangs on which of two came first by a millisecond, and that is chance. So the equations are of
quantiles: the mean of the shortest waits, of the next ones, and so on, live and simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gateway.routing.picker import PickInput
from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.fit import Fit, least_squares
from loadtests.sim.policies.routing_policy import RoutingPolicy
from loadtests.sim.shared_cores import OthersWork
from loadtests.sim.sim_request import SimRequest
from loadtests.sim.sim_worker import Step
from loadtests.traces import Trace

ROUNDS = 8
QUANTILES = 20
_NUM_TERMS = 6   # request, step, position, pair, context, row: see fit.py


class Seen(NamedTuple):
    """One request of a live run: which worker answered, by number, and seconds from when it was due."""

    worker: int
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """A trace as it was sent, what became of each request, and what else was on the cores."""

    trace: Trace
    seen: Sequence[Seen]
    others: OthersWork | None = None


class AsSeen(RoutingPolicy):
    """Every request goes where it went."""

    name = "as_seen"

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = seen

    def position(self, given: PickInput, request: SimRequest) -> int:
        return self._seen[request.index].worker


class _Equations(NamedTuple):
    """terms @ (request_s, ... row_s) = wanted."""

    terms: np.ndarray
    wanted: np.ndarray

    def error_of(self, solution: np.ndarray) -> float:
        return float(np.sqrt(np.square(self.terms @ solution - self.wanted).mean()))

    def in_quantiles(self, solution: np.ndarray) -> _Equations:
        """Shortest first on both sides, in units of the mean."""
        order = np.argsort(self.terms @ solution, kind="stable")
        groups = np.array_split(np.arange(len(order)), min(QUANTILES, len(order)))
        terms, wanted = (np.array([column[group].mean(axis=0) for group in groups])
                         for column in (self.terms[order], np.sort(self.wanted)))
        return _Equations(terms / self.wanted.mean(), wanted / self.wanted.mean())


def fit_to_runs(runs: Sequence[Run], first: Fit, settings: ClusterSettings) -> Fit:
    """Least squares over waits for the first token, and from there to the end. Of the rounds the one whose own
    simulation was closest."""
    best, best_error, now = first, float("inf"), first
    for _ in range(ROUNDS):
        equations = _equations_of(runs, now, settings)
        error = equations.error_of(_solution(now))
        if error < best_error:
            best, best_error = replace(now, mean_error_ratio=error, num_samples=len(equations.wanted)), error
        found = least_squares(equations.terms, equations.wanted)
        now = _fit_of((found + _solution(now)) / 2, now)
    return best


def _equations_of(runs: Sequence[Run], fitted: Fit, settings: ClusterSettings) -> _Equations:
    solution = _solution(fitted)
    parts = [part.in_quantiles(solution) for run in runs for part in _simulated(run, fitted, settings)
             if len(part.wanted)]
    return _Equations(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _simulated(run: Run, fitted: Fit, settings: ClusterSettings) -> list[_Equations]:
    """One equation a request: its wait for the first token, its wait from there on."""
    steps = [_Steps() for _ in range(settings.num_workers)]
    network_s = fitted.request_s / 2
    cluster = Cluster(run.trace, replace(
        settings, others_work=run.others, model=fitted.model, network_s=network_s, coalesce=False,
        began=lambda number, step: steps[number].add(step)), lambda: AsSeen(run.seen))
    cluster.run()
    firsts, rests = [], []
    for request, seen in zip(cluster.requests, run.seen, strict=True):
        if request.first_token_at is None or request.ended_at is None:
            continue
        own = steps[seen.worker]
        came_at, first_at, ended_at = (request.arrives_at + network_s, request.first_token_at - network_s,
                                       request.ended_at - network_s)
        firsts.append([1.0, *own.between(came_at, first_at), seen.ttft_s])
        if request.output_tokens > 1:
            rests.append([0.0, *own.between(first_at, ended_at), seen.total_s - seen.ttft_s])
    return [_Equations(part[:, :-1], part[:, -1])
            for part in (np.array(rows).reshape(-1, _NUM_TERMS + 1) for rows in (firsts, rests))]


class _Steps:
    """One worker's, in order, with the terms of each times how much longer than alone it took."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._steps: list[tuple[float, float, np.ndarray]] = []

    def add(self, step: Step) -> None:
        stretch = step.took_s / step.alone_s if step.alone_s > 0 else 0.0
        self._ends.append(step.began_at + step.took_s)
        self._steps.append((step.began_at, step.took_s, np.array([
            stretch, stretch * (step.prefill_tokens + step.decode_rows), stretch * step.prefill_pairs,
            stretch * step.decode_context, stretch * step.decode_rows])))

    def between(self, start: float, end: float) -> np.ndarray:
        """Their sums in that time; of a step that was under way at `start`, as much as was left."""
        total = np.zeros(_NUM_TERMS - 1)
        for place in range(bisect_right(self._ends, start), len(self._ends)):
            began_at, took_s, terms = self._steps[place]
            if began_at >= end:
                break
            if took_s > 0:
                total += terms * ((min(end, began_at + took_s) - max(start, began_at)) / took_s)
        return total


def _solution(fitted: Fit) -> np.ndarray:
    model = fitted.model
    return np.array([fitted.request_s, model.floor_s, model.token_s, model.pair_s, model.context_s, model.row_s])


def _fit_of(found: np.ndarray, like: Fit) -> Fit:
    request_s, floor_s, token_s, pair_s, context_s, row_s = (float(value) for value in found)
    model = replace(like.model, source="live runs", floor_s=floor_s, token_s=token_s, pair_s=pair_s,
                    context_s=context_s, row_s=row_s)
    return replace(like, model=model, request_s=request_s)
