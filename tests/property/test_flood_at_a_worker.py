"""A flood in front of a worker that computes several prompts a step: virtual time, the gateway's line, the worker's
scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from gateway.admission.line import Line
from gateway.admission.places import Places
from gateway.admission.queue import FairQueue, Waiting
from tests.support.core_builders import make_scheduler, make_sequence
from worker.core.batch import SampledToken, StepResult

QUIET_TOKENS, FLOOD_TOKENS = 741, 190
STEP_S, TOKEN_S = 0.0015, 0.00003   # a step, and each position in it
QUIET_PER_S, FLOOD_PER_S = 10.0, 800.0
DURATION_S, BEGINNINGS = 8.0, 3


def arrivals(tenant_id: str, per_s: float, seed: int) -> list[tuple[float, str]]:
    chance, at, found = random.Random(f"{tenant_id}-{seed}"), 0.0, []
    while per_s and (at := at + chance.expovariate(per_s)) < DURATION_S:
        found.append((at, tenant_id))
    return found


@dataclass
class Site:
    """A gateway with `num_places` and a worker. `tells_tenants`: whether the worker knows whose a prompt is."""

    num_places: int
    tells_tenants: bool = True
    now: float = 0.0
    quiet_ttft_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        queue = FairQueue(max_requests=200, max_bytes=1 << 30, ageing_s=10.0, catch_up_tokens=32_768,
                          head_start_tokens=8192)
        self.line = Line(queue, Places(), reserved_ratio=0.125)
        self.scheduler = make_scheduler(8192)
        self.at_worker: dict[int, Waiting] = {}
        self.num_sent = 0

    def serve(self, coming: list[tuple[float, str]]) -> None:
        """All of it, to the last answer."""
        coming = sorted(coming, reverse=True)
        while coming or not self.scheduler.idle():
            if self.scheduler.idle():
                self.now = max(self.now, coming[-1][0])
            self._arrive(coming)
            plan = self.scheduler.schedule()
            assert plan is not None, "somebody is there"
            self.now += STEP_S + TOKEN_S * plan.num_tokens
            self._arrive(coming)
            sampled = {share.seq_id: SampledToken(1) for share in plan.sequences if share.samples}
            for update in self.scheduler.commit(StepResult(plan.step_id, sampled)):
                self._answered(self.at_worker.pop(update.seq_id))
            self.scheduler.take_events()

    def _arrive(self, coming: list[tuple[float, str]]) -> None:
        while coming and coming[-1][0] <= self.now:
            at, tenant_id = coming.pop()
            entry = Waiting(tenant_id, QUIET_TOKENS if tenant_id == "quiet" else FLOOD_TOKENS, 1000, at)
            if self.line.take_at_once(entry, self.num_places):
                self._send(entry)
            else:
                self.line.queue.offer(entry)

    def _send(self, entry: Waiting) -> None:
        self.num_sent += 1
        prompt = random.Random(self.num_sent).choices(range(1000), k=entry.cost_tokens)
        assert self.scheduler.submit(make_sequence(
            self.num_sent, prompt, tenant=entry.tenant_id if self.tells_tenants else None)) is None
        self.at_worker[self.num_sent] = entry

    def _answered(self, entry: Waiting) -> None:
        if entry.tenant_id == "quiet":
            self.quiet_ttft_s.append(self.now - entry.arrived_at)
        self.line.give_back(entry.tenant_id)
        while (following := self.line.take_next(self.num_places)) is not None:
            self._send(following)


def quiet_p99_s(site: Site, flood_per_s: float) -> float:
    ttft_s: list[float] = []
    for seed in range(BEGINNINGS):
        fresh = replace(site, quiet_ttft_s=ttft_s)
        fresh.serve(arrivals("quiet", QUIET_PER_S, seed) + arrivals("flood", flood_per_s, seed))
    assert len(ttft_s) > 200
    return sorted(ttft_s)[int(0.99 * len(ttft_s))]


@pytest.mark.parametrize(("tells_tenants", "is_felt"), [(True, False), (False, True)])
def test_a_flood_that_shares_a_workers_steps_is_felt_only_where_the_worker_knows_no_tenants(
        *, tells_tenants: bool, is_felt: bool) -> None:
    site = Site(num_places=8, tells_tenants=tells_tenants)
    alone_s, beside_s = quiet_p99_s(site, 0.0), quiet_p99_s(site, FLOOD_PER_S)
    assert (beside_s > 1.5 * alone_s) == is_felt, (alone_s, beside_s)
