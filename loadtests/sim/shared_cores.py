"""The cores of one machine, shared by the workers that run on it.

Owns who computes there now. A step is as long as it would be alone times how often its workers want more cores than
there are when it begins.

Known approximation: whoever begins or ends a step meanwhile does not change it. Steps are short beside what is waited
for.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.shared_cores import CoreSet, CpuShare, crowded


class SharedCores:
    """Each worker computes on one core at a time."""

    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self._at_work: set[str] = set()

    def begin(self, worker_id: str) -> float:
        """It begins a step: how many times longer than alone it takes."""
        self._at_work.add(worker_id)
        return max(1.0, len(self._at_work) / self.num_cores)

    def rest(self, worker_id: str) -> None:
        """It has nothing to compute."""
        self._at_work.discard(worker_id)


class Machines:
    """Which workers, by number, share the cores of one: the first so many, the next so many, and so on."""

    def __init__(self, workers_each: int, cores_each: int) -> None:
        self._workers_each = workers_each
        self._cores_each = cores_each
        self._cores: dict[int, SharedCores] = {}

    def cores_of(self, number: int) -> SharedCores | None:
        """None where there is a core for each worker."""
        if self._workers_each <= self._cores_each:
            return None
        return self._cores.setdefault(number // self._workers_each, SharedCores(self._cores_each))

    def core_sets(self, worker_ids: Sequence[str]) -> tuple[CoreSet, ...]:
        """What gateways are told of it."""
        return crowded(CpuShare(worker_id, f"m{number // self._workers_each}", self._cores_each, 1)
                       for number, worker_id in enumerate(worker_ids))
