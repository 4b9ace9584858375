"""A simulated cluster: gateways and workers joined by a network with delays and losses.

Owns who talks to whom and how late. It must never decide: gateways route, workers schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gateway.routing.copy_plan import LOOK_EVERY_S
from loadtests.sim.block_store import Change
from loadtests.sim.clock import VirtualClock
from loadtests.sim.cost_model import DEFAULT_MODEL, MODELS, CostModel
from loadtests.sim.policies.routing_policy import RoutingPolicy
from loadtests.sim.restarts import schedule_storm
from loadtests.sim.shared_cores import Machines, OthersWork
from loadtests.sim.sim_copies import copy_request
from loadtests.sim.sim_gateway import SimGateway
from loadtests.sim.sim_request import SimRequest, requests_of, scheme_of
from loadtests.sim.sim_worker import SimWorker, Step, WorkerListener
from loadtests.traces import Trace


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Delays are one way. `event_loss_ratio` of the batches never arrive; the hole is found by the next batch, and a
    snapshot follows after `resync_s`. `coalesce` False runs every decode step by itself. `shared_ledger`: what one
    gateway books the others know at once, as the processes of one gateway do; without it they know reports alone.
    `restart_storm`: see restarts.py. `copies_ahead`: of hot prefixes, where the policy has them made.
    `workers_per_machine` share `cores_per_machine`, a core each while they last, and with `others_work`, of which
    gateways are not told. `began` hears of each step of each worker, by number, where none are skipped over."""

    num_workers: int = 8
    blocks_per_worker: int = 4096
    model: CostModel = MODELS[DEFAULT_MODEL]
    num_gateways: int = 1
    seed: int = 0
    network_s: float = 0.0005
    event_delay_s: float = 0.002
    event_loss_ratio: float = 0.0
    resync_s: float = 0.1
    poll_interval_s: float = 1.0
    coalesce: bool = True
    shared_ledger: bool = False
    restart_storm: bool = False
    copies_ahead: bool = True
    workers_per_machine: int = 1
    cores_per_machine: int = 1
    others_work: OthersWork | None = None
    began: Callable[[int, Step], None] | None = None


class Cluster:
    """Runs one trace under one policy. `new_policy` makes a policy for each gateway."""

    def __init__(self, trace: Trace, settings: ClusterSettings, new_policy: Callable[[], RoutingPolicy]) -> None:
        self.settings = settings
        self.requests = requests_of(trace)
        self.clock = VirtualClock()
        scheme = scheme_of(trace)
        self._scheme = scheme
        self._machines = Machines(settings.workers_per_machine, settings.cores_per_machine, settings.others_work)
        self.workers = [self._new_worker(number) for number in range(settings.num_workers)]
        self.retired: list[SimWorker] = []
        self._worker_of = {worker.worker_id: worker for worker in self.workers}
        self.gateways = [SimGateway([worker.worker_id for worker in self.workers],
                                    new_policy(), scheme,
                                    seed=settings.seed * 7919 + number, first_report=self.workers[0].report(),
                                    poll_interval_s=settings.poll_interval_s, makes_copies=settings.copies_ahead,
                                    core_sets=self._machines.core_sets(list(self._worker_of)))
                         for number in range(settings.num_gateways)]
        self._copying: dict[int, SimGateway] = {}   # by the copy's index: they go on behind the requests'
        self.num_copies = 0
        if settings.shared_ledger:
            for gateway in self.gateways[1:]:
                gateway.join(self.gateways[0])
        self._losses = random.Random(settings.seed)
        self._uses_index = self.gateways[0].policy.uses_index
        self._num_batches = dict.fromkeys(self._worker_of, 0)
        self.num_done = 0

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Until every request has ended."""
        total = len(self.requests)
        self._arrive_next(0)
        for number, worker in enumerate(self.workers):
            self._poll_later(worker, self.settings.poll_interval_s * (number + 1) / len(self.workers))
        if self.settings.copies_ahead and self.gateways[0].policy.makes_copies:
            for number, gateway in enumerate(self.gateways):
                self._look_later(gateway, LOOK_EVERY_S * (number + 1) / len(self.gateways))
        if self.settings.restart_storm:
            schedule_storm(self)
        step, shown = self.clock.step, 0
        while self.num_done < total:
            step()
            if progress is not None and self.num_done > shown:
                shown = self.num_done
                progress(shown, total)

    def _arrive_next(self, index: int) -> None:
        """One arrival in the queue at a time: a quarter of a million would only make every event dearer."""
        if index < len(self.requests):
            request = self.requests[index]
            self.clock.at(request.arrives_at, lambda: self._arrive(request))

    def _gateway_of(self, request: SimRequest) -> SimGateway:
        return self.gateways[request.index % len(self.gateways)]

    def _arrive(self, request: SimRequest) -> None:
        self._arrive_next(request.index + 1)
        self._route(request)

    def _route(self, request: SimRequest) -> None:
        decision = self._gateway_of(request).route(request, self.clock.now)
        request.worker_id, request.predicted_tokens = decision.endpoint_id, decision.matched_tokens
        worker = self._worker_of[decision.endpoint_id]
        self.clock.after(self.settings.network_s, lambda: self._submit(worker, request))

    def restart(self, number: int) -> None:
        """A worker is replaced by a cold one on the same address; its requests begin again elsewhere, or there."""
        old = self.workers[number]
        new = self.workers[number] = self._worker_of[old.worker_id] = self._new_worker(number)
        self.retired.append(old)
        self._num_batches[old.worker_id] = 0
        for gateway in self.gateways:
            gateway.replaced(old.worker_id, new.report(), self.clock.now)
        for request in old.stop():
            if request.index in self._copying:
                self._end_copy(request.index)
                continue
            gateway = self._gateway_of(request)
            self.clock.after(self.settings.network_s, self._again(gateway, request))

    def _again(self, gateway: SimGateway, request: SimRequest) -> Callable[[], None]:
        def route() -> None:
            gateway.ended(request, self.clock.now, well=False)
            self._route(request)
        return route

    def _new_worker(self, number: int) -> SimWorker:
        settings = self.settings
        return SimWorker(f"w{number:04d}", self.clock, settings.model, num_blocks=settings.blocks_per_worker,
                         scheme=self._scheme, listener=self._listener(number), coalesce=settings.coalesce,
                         cores=self._machines.cores_of(number))

    def _submit(self, worker: SimWorker, request: SimRequest) -> None:
        if worker.is_stopped:   # it was on its way there
            worker = self._worker_of[worker.worker_id]
        if not worker.submit(request):
            request.failed = True
            self.clock.after(self.settings.network_s, lambda: self._end(request))

    def _look_later(self, gateway: SimGateway, delay_s: float) -> None:
        self.clock.after(delay_s, lambda: self._look(gateway))

    def _look(self, gateway: SimGateway) -> None:
        now = self.clock.now
        copy = gateway.next_copy(now)
        if copy is not None:
            index = len(self.requests) + self.num_copies
            self.num_copies += 1
            self._copying[index] = gateway
            gateway.begin_copy(copy, index, now)
            worker, request = self._worker_of[copy.endpoint_id], copy_request(copy.prefix, index, now)
            self.clock.after(self.settings.network_s, lambda: self._submit(worker, request))
        self._look_later(gateway, LOOK_EVERY_S)

    def _end_copy(self, index: int) -> None:
        self._copying.pop(index).end_copy(index, self.clock.now)

    def _end(self, request: SimRequest) -> None:
        if request.index in self._copying:
            self._end_copy(request.index)
            return
        request.ended_at = self.clock.now
        self._gateway_of(request).ended(request, self.clock.now)
        self.num_done += 1

    def _listener(self, number: int) -> WorkerListener:
        clock, network_s = self.clock, self.settings.network_s

        def first_token(request: SimRequest, cached_tokens: int) -> None:
            if request.index in self._copying:
                return
            if request.first_token_at is None:
                request.cached_tokens = cached_tokens
                request.first_token_at = clock.now + network_s
            clock.after(network_s, lambda: self._gateway_of(request).first_token(request, clock.now))

        def finished(request: SimRequest) -> None:
            clock.after(network_s, lambda: self._end(request))

        began = self.settings.began
        return WorkerListener(first_token, finished, lambda changes: self._publish(self.workers[number], changes),
                              None if began is None else lambda step: began(number, step))

    def _publish(self, worker: SimWorker, changes: list[Change]) -> None:
        if not self._uses_index:
            return
        seq = self._num_batches[worker.worker_id]
        self._num_batches[worker.worker_id] = seq + 1
        for gateway in self.gateways:
            if self.settings.event_loss_ratio and self._losses.random() < self.settings.event_loss_ratio:
                continue
            self.clock.after(self.settings.event_delay_s, self._delivery(gateway, worker, seq, changes))

    def _delivery(self, gateway: SimGateway, worker: SimWorker, seq: int,
                  changes: list[Change]) -> Callable[[], None]:
        def deliver() -> None:
            if worker.is_stopped:
                return   # its connection is gone
            if not gateway.changes(worker.worker_id, seq, changes):
                self.clock.after(self.settings.resync_s, lambda: self._resync(gateway, worker))
        return deliver

    def _resync(self, gateway: SimGateway, worker: SimWorker) -> None:
        if worker.is_stopped:
            return
        worker.observe()
        gateway.restart(worker.worker_id, self._num_batches[worker.worker_id], worker.pool.snapshot())

    def _poll_later(self, worker: SimWorker, delay_s: float) -> None:
        self.clock.after(delay_s, lambda: self._poll(worker))

    def _poll(self, worker: SimWorker) -> None:
        worker = self._worker_of[worker.worker_id]
        report = worker.report()
        for gateway in self.gateways:
            gateway.reported(worker.worker_id, report, self.clock.now)
        self._poll_later(worker, min(gateway.look_again_after_s(worker.worker_id) for gateway in self.gateways))
