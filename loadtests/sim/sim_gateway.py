"""One simulated gateway process: the server's prefix index, load ledger and policies on the virtual clock.

Owns what one replica believes. It decides and books as gateway.server.dispatch does, and corrects reports by its own
ledger as gateway.knowledge.endpoint_table does. It must never look into a worker: reports and cache events reach it
late, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.routing.busy_steps import BusySteps
from gateway.routing.copy_plan import Copy, Sight
from gateway.routing.cost import CandidateCost
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.fading_rates import FadingRates, ReportedRates
from gateway.routing.load_ledger import NO_LOAD, Booking, Footprint, LoadLedger, LoadView
from gateway.routing.others_share import OthersShare, look_again_after_s
from gateway.routing.output_length import OutputLength
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision
from gateway.routing.prefix_index import PrefixIndex, Speculation
from gateway.routing.rate_estimator import Stretch
from gateway.routing.shared_cores import CoreSet, Crowding, crowding_of
from gateway.routing.unseen_work import UnseenWork
from gateway.routing.usual_cost import Standings
from loadtests.sim.block_store import Change, Cleared, Removed, Stored
from loadtests.sim.policies.routing_policy import RoutingPolicy
from loadtests.sim.sim_copies import MODEL, SimCopies, book_copy, whole_holders
from loadtests.sim.sim_request import SimRequest
from loadtests.sim.sim_worker import Report
from worker.protocol.block_hash import HashScheme

INDEX_BYTES_MAX = 4 << 30
EPOCH = "simulated"
_MODELS = frozenset({MODEL})


@dataclass(slots=True)
class _Known:
    """What this replica knows of one worker."""

    position: int
    report: Report
    own_load_at_report: LoadView
    others: OthersShare = field(default_factory=OthersShare)
    next_seq: int = 0
    in_sequence: bool = True
    epoch: int = 0
    faded: ReportedRates | None = None


@dataclass(slots=True)
class Placed:
    """A booked request."""

    worker_id: str
    booking: Booking
    bet: Speculation | None
    cost: CandidateCost | None
    at: float


class SimGateway:
    """`worker_ids` in the order of the configuration; `makes_copies`: of hot prefixes, where the policy has it."""

    def __init__(self, worker_ids: Sequence[str], policy: RoutingPolicy, scheme: HashScheme, *, seed: int,
                 first_report: Report, poll_interval_s: float = 1.0, makes_copies: bool = False,
                 core_sets: Sequence[CoreSet] = ()) -> None:
        self.policy = policy
        self.num_gaps = 0
        self._scheme = scheme
        self._poll_interval_s = poll_interval_s
        self._draw = random.Random(seed)
        self._index = PrefixIndex(INDEX_BYTES_MAX)
        self._ledger = LoadLedger()
        self._loads: dict[str, LoadView] = {}
        self._turn = 0
        self._outputs = OutputLength()
        self._stretch = Stretch()
        self._busy_steps = policy.busy_steps = BusySteps()
        self._placed: dict[int, Placed] = {}
        self._known = {worker_id: _Known(position, first_report, LoadView())
                       for position, worker_id in enumerate(worker_ids)}
        self._views: list[EndpointView] = []
        self._standings = Standings()
        self._unseen = UnseenWork()
        self._fading = FadingRates()
        self._copies = SimCopies(scheme.block_size) if makes_copies and policy.makes_copies else None
        self._siblings = [self]   # who books in this ledger
        self._core_sets = core_sets
        for worker_id in worker_ids:
            self._views.append(self._view(worker_id))

    def route(self, request: SimRequest, now: float) -> RoutingDecision:
        """Decide and book, with nothing in between."""
        hashes = request.hash_blocks(self._scheme)
        matches = self._index.match(hashes, now) if self.policy.uses_index else {}
        decision = self.policy.choose(PickInput(
            endpoints=self._views, prompt_tokens=request.prompt_tokens, matches=matches, loads=self._loads,
            expected_output_tokens=self._outputs.expected(""), random_ratio=self._draw.random(), turn=self._turn,
            now=now, shared_ratio=self._ledger.shared_ratio, stretch=self._stretch.ratio,
            streams_of=self._ledger.streams, lengths=self._outputs.profile(""), chain=hashes,
            busy_step_of=self._busy_steps.step_s, crowding=self._crowding(),
            standings=self._standings, unseen_requests=self._unseen.requests(now)), request)
        assert not isinstance(decision, NoEndpoint), "a simulated worker is always ready"
        self._turn += 1
        self._book(request, decision, now)
        if self._copies is not None:
            self._copies.note(request, hashes, decision.most_matched_tokens, now)
        return decision

    def _crowding(self) -> dict[str, Crowding]:
        return crowding_of(self._core_sets, {view.endpoint_id: view for view in self._views},
                           self._loads) if self._core_sets else {}

    def first_token(self, request: SimRequest, now: float) -> None:
        placed = self._placed[request.index]
        placed.booking.prefill_done(now)
        if placed.cost is not None:
            self._busy_steps.saw(placed.cost, now - placed.at)
        if placed.bet is not None:
            placed.bet.settle(now)
        self._load_changed(placed.worker_id)
        self.policy.prefill_done(request, placed.worker_id)

    def next_copy(self, now: float) -> Copy | None:
        """A hot prefix that a further worker should compute ahead of need."""
        return None if self._copies is None else self._copies.next(
            Sight(lambda: self._views, self._loads, lambda prefix: whole_holders(self._index, prefix, now),
                  crowding=self._crowding()), now)

    def begin_copy(self, copy: Copy, index: int, now: float) -> None:
        """It is sent: booked and bet on as a request's prompt."""
        assert self._copies is not None, "nobody plans copies here"
        worker_id, ttl_s = copy.endpoint_id, self.policy.speculative_ttl_s
        bet = self._index.speculate(worker_id, copy.prefix.chain, now)
        bet.hold(ttl_s)
        for sibling in self._siblings:
            if sibling is not self:
                sibling._index.speculate(worker_id, copy.prefix.chain, now + ttl_s)
        booking = book_copy(self._ledger, copy, f"{EPOCH} {self._known[worker_id].epoch}")
        self._copies.begin(index, worker_id, booking, bet)
        self._load_changed(worker_id)

    def end_copy(self, index: int, now: float) -> None:
        """It is there, or its worker is gone."""
        assert self._copies is not None, "nobody plans copies here"
        self._load_changed(self._copies.end(index, now))

    def join(self, other: SimGateway) -> None:
        """From now on both book in one ledger and hear of each other's bets, as processes of one gateway do."""
        self._ledger, self._loads = other._ledger, other._loads
        self._siblings = other._siblings
        self._siblings.append(self)

    def replaced(self, worker_id: str, report: Report, now: float) -> None:
        """The worker is another process now: nothing is there that was believed, and nothing booked."""
        known = self._known[worker_id]
        known.epoch += 1
        known.next_seq, known.in_sequence = 0, True
        self._index.purge(worker_id)
        self._busy_steps.forget(worker_id)
        self._fading.forget(worker_id)
        self._ledger.forget(worker_id, f"{EPOCH} {known.epoch - 1}")
        self._loads.pop(worker_id, None)
        self.reported(worker_id, report, now)

    def ended(self, request: SimRequest, now: float, *, well: bool = True) -> None:
        placed = self._placed.pop(request.index)
        placed.booking.release()
        if placed.bet is not None:
            placed.bet.settle(now)
        self._load_changed(placed.worker_id)
        self.policy.ended(request, placed.worker_id)
        if well:
            self._outputs.observe("", request.output_tokens)
            self._saw_stream(request, placed.worker_id)

    def _saw_stream(self, request: SimRequest, worker_id: str) -> None:
        began_at, ended_at = request.first_token_at, request.ended_at
        if began_at is not None and ended_at is not None and request.output_tokens > 1:
            self._stretch.saw((ended_at - began_at) / (request.output_tokens - 1),
                              self._known[worker_id].report.decode_step_s)

    def reported(self, worker_id: str, report: Report, now: float) -> None:
        """The worker's answer to a poll arrived."""
        known = self._known[worker_id]
        known.report, known.own_load_at_report = report, self._ledger.load(worker_id)
        own, reported = known.own_load_at_report.num_inflight, report.num_running + report.num_waiting
        known.others.saw(own, reported, now)
        self._unseen.saw(own, reported, now, next_after_s=self.look_again_after_s(worker_id))
        self._fading.saw(worker_id, MODEL, ReportedRates(report.prefill_tokens_per_s, report.decode_step_s),
                         has_work=bool(own or reported), now=now)
        known.faded = self._fading.faded(worker_id, now)
        self._renew(worker_id)

    def look_again_after_s(self, worker_id: str) -> float:
        """Until it wants the worker's next report."""
        return look_again_after_s(self._poll_interval_s, max(self._known[worker_id].others.ratio, self._unseen.ratio),
                                  len(self._views))

    def changes(self, worker_id: str, seq: int, changes: Sequence[Change]) -> bool:
        """A batch of cache events arrived. False: one before it was lost, so a snapshot must be fetched."""
        known = self._known[worker_id]
        if not self.policy.uses_index or seq < known.next_seq:
            return True
        if known.in_sequence and seq == known.next_seq:
            known.next_seq = seq + 1
            self._apply(worker_id, changes)
            return True
        if not known.in_sequence:
            return True   # a snapshot is on its way and will hold this too
        self.num_gaps += 1
        known.in_sequence = False
        self._index.purge(worker_id)
        self._renew(worker_id)
        return False

    def restart(self, worker_id: str, next_seq: int, snapshot: Sequence[Change]) -> None:
        """A snapshot replaces what was believed; batches from `next_seq` on follow it."""
        known = self._known[worker_id]
        known.next_seq, known.in_sequence = next_seq, True
        self._index.purge(worker_id)
        self._apply(worker_id, snapshot)
        self._renew(worker_id)

    def _apply(self, worker_id: str, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, Stored):
                self._index.store(worker_id, change.hashes, parent=change.parent)
            elif isinstance(change, Removed):
                self._index.remove(worker_id, change.hashes)
            elif isinstance(change, Cleared):
                self._index.purge(worker_id)

    def _book(self, request: SimRequest, decision: RoutingDecision, now: float) -> None:
        worker_id = decision.endpoint_id
        block_size = self._scheme.block_size
        booking = self._ledger.book(
            worker_id, f"{EPOCH} {self._known[worker_id].epoch}", prefill_tokens=decision.uncached_tokens,
            context_tokens=request.prompt_tokens,
            footprint=Footprint(request.hashes, decision.matched_tokens // block_size, decision.matched_tokens,
                                self._outputs.expected(""), now))
        bet = None
        if self.policy.uses_index:
            cost = decision.cost
            prefill_s = cost.first_token_s if cost is not None else 0.0
            expires_at = now + prefill_s + self.policy.speculative_ttl_s
            bet = self._index.speculate(worker_id, request.hashes, expires_at)
            bet.hold(self.policy.speculative_ttl_s)
            for sibling in self._siblings:
                if sibling is not self:   # told of it, as processes of one gateway tell each other
                    sibling._index.speculate(worker_id, request.hashes, expires_at)
        self._unseen.booked(now)
        if (known := self._known[worker_id]).faded is not None:
            self._fading.tried(worker_id, now)
            known.faded = None
        self._placed[request.index] = Placed(worker_id, booking, bet, decision.cost, now)
        self._load_changed(worker_id)
        self.policy.booked(request, worker_id)

    def _load_changed(self, worker_id: str) -> None:
        self._loads[worker_id] = self._ledger.load(worker_id)
        for gateway in self._siblings:
            gateway._renew(worker_id)

    def _renew(self, worker_id: str) -> None:
        view = self._views[self._known[worker_id].position] = self._view(worker_id)
        self.policy.endpoint_changed(view, self._loads.get(worker_id, NO_LOAD))

    def _view(self, worker_id: str) -> EndpointView:
        """The last report, less what of ours has ended since."""
        known = self._known[worker_id]
        report, before, now = known.report, known.own_load_at_report, self._ledger.load(worker_id)
        num_ended = before.num_inflight - now.num_inflight
        prefill_done = before.queued_prefill_tokens - now.queued_prefill_tokens
        context_gone = before.decode_context_tokens - now.decode_context_tokens
        if report.num_running + report.num_waiting <= before.num_inflight:
            num_ended, prefill_done, context_gone = max(0, num_ended), max(0, prefill_done), max(0, context_gone)
        waiting = report.waiting_prefill_tokens
        prefill_tokens_per_s, decode_step_s = known.faded or (report.prefill_tokens_per_s, report.decode_step_s)
        return EndpointView(
            endpoint_id=worker_id, epoch=EPOCH, models=_MODELS,
            knowledge=Knowledge.EXACT if known.in_sequence else Knowledge.APPROXIMATE,
            block_size=self._scheme.block_size, prefill_tokens_per_s=prefill_tokens_per_s,
            decode_step_s=decode_step_s, blocks_total=report.blocks_total, blocks_free=report.blocks_free,
            blocks_cached=report.blocks_cached,
            kv_usage_ratio=1 - (report.blocks_free + report.blocks_cached) / report.blocks_total,
            num_running=max(0, report.num_running - max(0, num_ended)),
            num_waiting=max(0, report.num_waiting - max(min(0, num_ended), num_ended - report.num_running)),
            waiting_prefill_tokens=max(0, waiting - prefill_done),
            running_prefill_tokens=max(0, report.running_prefill_tokens - max(0, prefill_done - waiting)),
            decode_context_tokens=max(0, report.decode_context_tokens - context_gone),
            held_tokens_at_report=before.held_tokens - waiting, others_ratio=known.others.ratio,
            step_tokens=report.step_tokens)
