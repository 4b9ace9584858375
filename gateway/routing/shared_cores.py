"""Endpoints whose engines compute on the same cores: what each of them takes from the others.

Owns who shares cores with whom, and how busy those are. Where threads are more than cores, an endpoint without work
is no idle capacity: once all cores are at work, whatever it computes slows the others. It must never decide; cost.py
prices.

Known approximation: an endpoint with any request keeps all its threads busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView


class CpuShare(NamedTuple):
    """What an endpoint says of where it computes: equal `cpu_id`, the same cores."""

    endpoint_id: str
    cpu_id: str
    num_cores: int
    num_threads: int


class CoreSet(NamedTuple):
    """Cores that more threads want than there are: of whom, and how many of each."""

    num_cores: int
    threads: Mapping[str, int]


class Crowding(NamedTuple):
    """What an endpoint meets on its cores: `busy_share` of them wanted by whoever has work, itself included as it is;
    `is_full` when all are, or would be with its own threads and then some. Prompts whose first token is waited for,
    and streams that have begun, are those of all who share them."""

    num_cores: int
    busy_share: float
    is_full: bool
    num_prompts: int
    num_streams: int


def crowded(shares: Iterable[CpuShare]) -> tuple[CoreSet, ...]:
    """Where endpoints have more threads than cores."""
    together: defaultdict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for share in shares:
        together[share.cpu_id, share.num_cores][share.endpoint_id] = share.num_threads
    return tuple(CoreSet(num_cores, threads) for (_, num_cores), threads in together.items()
                 if len(threads) > 1 and sum(threads.values()) > num_cores)


def crowding_of(core_sets: Sequence[CoreSet], views: Mapping[str, EndpointView],
                loads: Mapping[str, LoadView]) -> dict[str, Crowding]:
    """By endpoint, of all in `core_sets`. One that is not in `views` has no work."""
    found: dict[str, Crowding] = {}
    for num_cores, threads in core_sets:
        work = {endpoint_id: _work_of(views.get(endpoint_id), loads.get(endpoint_id, NO_LOAD))
                for endpoint_id in threads}
        busy = sum(threads[endpoint_id] for endpoint_id, (prompts, streams) in work.items() if prompts or streams)
        all_prompts, all_streams = map(sum, zip(*work.values(), strict=True))
        for endpoint_id, (prompts, streams) in work.items():
            wanted = busy if prompts or streams else busy + threads[endpoint_id]
            found[endpoint_id] = Crowding(num_cores, min(1.0, busy / num_cores),
                                          busy >= num_cores or wanted > num_cores, all_prompts, all_streams)
    return found


def _work_of(view: EndpointView | None, load: LoadView) -> tuple[int, int]:
    """Prompts and streams there, by the larger of our ledger and its report, as in cost.py."""
    reported, waiting = (0, 0) if view is None else (view.num_running + view.num_waiting, view.num_waiting)
    active = max(load.num_inflight, reported)
    prompts = max(load.num_inflight - load.num_decoding, waiting)
    return prompts, active - prompts
