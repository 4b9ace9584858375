"""The cores of one machine, shared by the workers that run on it and, where they are told of, by what serves them.

Owns who computes there now. With n workers at work and b CPU seconds that others need meanwhile, a step that takes s
alone takes

    max(s, (n * s + b) / num_cores)

Known approximation: whoever begins or ends a step meanwhile does not change it, and what serves a request or token is
paid by the steps that begin after it. Steps are short beside what is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gateway.routing.shared_cores import CoreSet, CpuShare, crowded

SAMPLE_S = 0.25       # other programs' work is told for each
LENGTH_ROUNDS = 6     # how long a step takes hangs on what they do meanwhile


@dataclass(frozen=True, slots=True)
class OthersWork:
    """CPU seconds on the same cores: gateway, clients and workers' servers, for each request and each token that is
    streamed; and other programs, in each SAMPLE_S from the first arrival on."""

    request_s: float = 0.0
    token_s: float = 0.0
    other_programs: tuple[float, ...] = ()


class SharedCores:
    """Each worker computes on one core at a time."""

    def __init__(self, num_cores: int, others: OthersWork | None = None) -> None:
        self.num_cores = num_cores
        self._others = others or OthersWork()
        self._programs_s = (0.0, *accumulate(self._others.other_programs))
        self._serving_s = 0.0                  # what requests and tokens took so far
        self._at_work: dict[str, float] = {}   # and how much others had done when each began its last step

    def begin(self, worker_id: str, alone_s: float, now: float) -> float:
        """It begins a step: how long that takes."""
        owed_s = self._serving_s - self._at_work.get(worker_id, self._serving_s)
        self._at_work[worker_id] = self._serving_s
        computed_s = len(self._at_work) * alone_s + owed_s
        took_s = max(alone_s, computed_s / self.num_cores)
        for _ in range(LENGTH_ROUNDS if self._others.other_programs else 0):
            programs_s = self._programs_until(now + took_s) - self._programs_until(now)
            took_s = max(alone_s, (computed_s + programs_s) / self.num_cores)
        return took_s

    def _programs_until(self, now: float) -> float:
        done = self._programs_s
        place = int(now / SAMPLE_S)
        if place >= len(done) - 1:
            return done[-1]
        return done[place] + (now / SAMPLE_S - place) * (done[place + 1] - done[place])

    def rest(self, worker_id: str) -> None:
        """It has nothing to compute."""
        self._at_work.pop(worker_id, None)

    def arrived(self) -> None:
        """A request came for one of the workers."""
        self._serving_s += self._others.request_s

    def streamed(self, num_tokens: int) -> None:
        """So many tokens were sent."""
        self._serving_s += self._others.token_s * num_tokens


class Machines:
    """Which workers, by number, share the cores of one: the first so many, the next so many, and so on."""

    def __init__(self, workers_each: int, cores_each: int, others: OthersWork | None = None) -> None:
        self._workers_each = workers_each
        self._cores_each = cores_each
        self._others = others
        self._cores: dict[int, SharedCores] = {}

    def cores_of(self, number: int) -> SharedCores | None:
        """None where there is a core for each worker, and for nobody else."""
        if self._workers_each <= self._cores_each and self._others is None:
            return None
        return self._cores.setdefault(number // self._workers_each, SharedCores(self._cores_each, self._others))

    def core_sets(self, worker_ids: Sequence[str]) -> tuple[CoreSet, ...]:
        """What gateways are told of it."""
        return crowded(CpuShare(worker_id, f"m{number // self._workers_each}", self._cores_each, 1)
                       for number, worker_id in enumerate(worker_ids))
