"""Who used the machine's cores during a run: engines, what serves them, and everybody else.

Owns the reading of the kernel's counters (Linux). Everybody else is what the machine was busy with, less ours; time
that a hypervisor kept for itself is theirs too. It must never load the machine so that it shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from loadtests.sim.shared_cores import SAMPLE_S

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)             # of /proc/stat's fields: idle, waiting for disks
_COUNTED = slice(0, 8)     # guests' time is in user's already


@dataclass(slots=True)
class CoresUsed:
    """CPU seconds of a run: engines; gateway, workers' servers and this process, each; others, for each SAMPLE_S."""

    engines_s: float = 0.0
    serving_s: dict[str, float] = field(default_factory=dict)
    others: tuple[float, ...] = ()

    @property
    def others_cores(self) -> float:
        """How many cores others kept busy, in the mean."""
        return sum(self.others) / SAMPLE_S / len(self.others) if self.others else 0.0


class _Counters(NamedTuple):
    engines_s: float
    serving_s: dict[str, float]
    busy_s: float

    @property
    def others_s(self) -> float:
        return self.busy_s - self.engines_s - sum(self.serving_s.values())


@contextlib.asynccontextmanager
async def watched_cores(workers: Sequence[int], gateway: int) -> AsyncIterator[CoresUsed]:
    """Filled in at the end. Of a worker's process ids the given one serves, its children compute."""
    used = CoresUsed()
    seen = [_counters(workers, gateway)]
    sampling = asyncio.create_task(_sample(seen, workers, gateway))
    try:
        yield used
    finally:
        sampling.cancel()
        seen.append(_counters(workers, gateway))
        first, last = seen[0], seen[-1]
        used.engines_s = last.engines_s - first.engines_s
        used.serving_s = {name: last.serving_s[name] - first.serving_s[name] for name in last.serving_s}
        used.others = others_of([one.others_s for one in seen])


async def _sample(seen: list[_Counters], workers: Sequence[int], gateway: int) -> None:
    began_at = asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(began_at + len(seen) * SAMPLE_S - asyncio.get_running_loop().time())
        seen.append(_counters(workers, gateway))


def others_of(totals: Sequence[float]) -> tuple[float, ...]:
    """From totals so far, of which one may be less than the one before: counters are read one after the other."""
    rising = list(totals)
    for place in range(1, len(rising)):
        rising[place] = max(rising[place], rising[place - 1])
    return tuple(later - earlier for earlier, later in pairwise(rising))


def _counters(workers: Sequence[int], gateway: int) -> _Counters:
    serving = {"gateway": sum(map(_cpu_s, (gateway, *_below(gateway)))), "workers_servers": sum(map(_cpu_s, workers)),
               "client": _cpu_s(os.getpid())}
    engines_s = sum(_cpu_s(pid) for worker in workers for pid in _below(worker))
    return _Counters(engines_s, serving, _busy_s())


def _busy_s() -> float:
    with Path("/proc/stat").open() as lines:
        fields = [int(text) for text in lines.readline().split()[1:]]
    return (sum(fields[_COUNTED]) - sum(fields[place] for place in _IDLE)) / _TICKS_PER_S


def _below(pid: int) -> Iterator[int]:
    for thread in _threads(pid):
        with contextlib.suppress(OSError):   # it has just ended
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from _below(int(child))


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    """User and system time of all its threads, also of those that have ended; 0 of a process that has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
