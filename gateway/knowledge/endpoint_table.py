"""Every worker that this gateway knows, and what is known about each.

Owns: Endpoint records. One task writes them (worker_poll.EndpointKeeper); everybody else reads.
Must never: do I/O, or decide where a request goes.

Two workers of one model are compatible when they turn text into the same tokens (tokenizer and template digests, and
the parity probe). Where only block size, KV dtype, exactness or seed differ, each simply has a hash scheme of its
own: their chains never meet, and prompts are hashed once per scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from gateway.knowledge.discovery.static import DiscoveredWorker
from gateway.knowledge.engines.headstart import Cpu, WorkerReport
from gateway.knowledge.parity import ParityReport
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.fading_rates import FadingRates, ReportedRates
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.others_share import OthersShare
from gateway.routing.shared_cores import CoreSet, CpuShare, Crowding, crowded, crowding_of
from gateway.routing.unseen_work import UnseenWork
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, HashScheme


class EndpointState(Enum):
    """`incompatible`: it answers, but its tokens differ from the model's reference: used when nothing else serves."""

    READY = "ready"
    UNREADY = "unready"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"


@dataclass(slots=True)
class FeedStatus:
    """How an endpoint's event feed is doing. Written by that feed alone; counters only grow."""

    in_sequence: bool = False
    num_applied_batches: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_resyncs: int = 0
    num_undecodable: int = 0
    num_duplicates: int = 0
    num_evicted_blocks: int = 0
    lag_s: float = 0.0
    detail: str = ""


class _Changes:
    """How often a field of any endpoint has been set: what was derived from them holds for as long as this does. And
    how often one has come to compute elsewhere: far less often than reports come."""

    count = 0
    of_cores = 0


class _Seen:
    """What routing was shown of an endpoint last, and while it holds: until a field of any is set (`count`), the feed
    falls out of sequence, or our own load there changes."""

    __slots__ = ("count", "in_sequence", "own_load", "report_alone", "view")

    def __init__(self, count: int, in_sequence: bool, report_alone: EndpointView) -> None:
        self.count = count
        self.in_sequence = in_sequence
        self.own_load: LoadView | None = None
        self.report_alone = self.view = report_alone


@dataclass(slots=True)
class Endpoint:
    """One worker. `report` is its last GET /kv; None until it answered once.

    `own_load_at_report` is what our ledger had there when the report came: the part of the report that is ours.
    `faded_rates` stand in for reported ones that nothing has confirmed for a while (fading_rates.py).
    """

    worker: DiscoveredWorker
    reachable: bool = False
    joined_epoch: str | None = None
    compatible: bool = True
    drain_requested: bool = False
    report: WorkerReport | None = None
    own_load_at_report: LoadView = NO_LOAD
    faded_rates: ReportedRates | None = None
    others: OthersShare = field(default_factory=OthersShare)
    scheme: HashScheme | None = None
    parity: ParityReport | None = None
    feed: FeedStatus = field(default_factory=FeedStatus)
    detail: str = "not reached yet"
    endpoint_id: str = field(init=False)
    _seen: _Seen | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.endpoint_id = self.worker.endpoint_id

    def __setattr__(self, name: str, value: object) -> None:
        if name == "joined_epoch" or (name == "report" and _cpu_of(value) != _cpu_of(getattr(self, name, None))):
            _Changes.of_cores += 1
        object.__setattr__(self, name, value)
        _Changes.count += 1

    @property
    def epoch(self) -> str | None:
        return self.joined_epoch

    @property
    def model(self) -> str | None:
        return self.report.model if self.report is not None else None

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters of its model: the content digest by the name that clients ask for."""
        return self.report.adapters if self.report is not None else {}

    @property
    def cpu_share(self) -> CpuShare | None:
        """Where it computes; None while it has not joined, and of one that does not say."""
        cpu = self.report.cpu if self.report is not None and self.joined_epoch is not None else None
        return None if cpu is None else CpuShare(self.endpoint_id, cpu.id, cpu.cores, cpu.threads)

    def serves(self, model: str) -> bool:
        """Whether its model or one of its adapters is called so."""
        return self.model == model or model in self.adapters

    @property
    def state(self) -> EndpointState:
        """Unready beats everything, then draining: neither takes new work."""
        if not self.reachable or self.joined_epoch is None:
            return EndpointState.UNREADY
        if self.drain_requested or (self.report is not None and self.report.draining):
            return EndpointState.DRAINING
        return EndpointState.READY if self.compatible else EndpointState.INCOMPATIBLE

    @property
    def knowledge(self) -> Knowledge:
        """Exact only while the feed is in sequence; our own routing history counts where hashes mean something."""
        if self.scheme is None or not self.compatible:
            return Knowledge.NONE
        return Knowledge.EXACT if self.feed.in_sequence else Knowledge.APPROXIMATE

    @property
    def token_refused(self) -> bool:
        """Whether it says that it would not honour our internal requests: it then gets the client's JSON alone."""
        return self.report is not None and self.report.internal_requests in ("refused", "off")

    def view(self, own_load: LoadView) -> EndpointView:
        """The snapshot that routing decides on, with `own_load` now in the ledger. Only for one that has joined.

        A report is up to an interval old. Whatever of ours has ended since is taken off it, or a worker that has just
        answered would look busy until the next poll, and its own next turn would be sent elsewhere. Where it counts
        more than was ours, the rest is somebody else's, and what is new of ours comes on top.
        """
        seen = self._seen
        if seen is None or seen.count != _Changes.count or seen.in_sequence is not self.feed.in_sequence:
            seen = _Seen(_Changes.count, self.feed.in_sequence, self._report_alone())
            object.__setattr__(self, "_seen", seen)  # remembered, which is no change
        if own_load is not seen.own_load:
            seen.own_load, seen.view = own_load, self._less_ended(seen.report_alone, own_load)
        return seen.view

    def _report_alone(self) -> EndpointView:
        """The snapshot without what has ended since the report."""
        report, before = self.report, self.own_load_at_report
        assert report is not None, "routing was shown a worker that never answered"
        assert self.joined_epoch is not None, "routing was shown a worker that has not joined"
        blocks, load = report.blocks, report.load
        rates = self.faded_rates or report.rates
        return EndpointView(
            endpoint_id=self.endpoint_id, epoch=self.joined_epoch, models=frozenset((report.model, *report.adapters)),
            ready=self.state is not EndpointState.UNREADY,
            draining=self.state is EndpointState.DRAINING, knowledge=self.knowledge, block_size=report.block_size,
            prefill_tokens_per_s=rates.prefill_tokens_per_s, decode_step_s=rates.decode_step_s,
            blocks_total=blocks.total, blocks_free=blocks.free, blocks_cached=blocks.cached,
            max_context=report.max_context, kv_usage_ratio=self.kv_usage_ratio,
            num_running=load.running, num_waiting=load.waiting, waiting_prefill_tokens=load.waiting_prefill_tokens,
            running_prefill_tokens=load.running_prefill_tokens, decode_context_tokens=load.decode_context_tokens,
            held_tokens_at_report=before.held_tokens - load.waiting_prefill_tokens, others_ratio=self.others.ratio,
            step_tokens=report.scheduling.token_budget)

    def _less_ended(self, view: EndpointView, own_load: LoadView) -> EndpointView:
        """`view`, a report, as it would be if it came now."""
        before = self.own_load_at_report
        num_ended = before.num_inflight - own_load.num_inflight
        prefill_done = before.queued_prefill_tokens - own_load.queued_prefill_tokens
        context_gone = before.decode_context_tokens - own_load.decode_context_tokens
        running, waiting = view.num_running, view.num_waiting
        if running + waiting <= before.num_inflight:   # all is ours: the ledger has what is new
            if num_ended <= 0 and prefill_done <= 0 and context_gone <= 0:
                return view
            num_ended, prefill_done, context_gone = max(0, num_ended), max(0, prefill_done), max(0, context_gone)
        if not (num_ended or prefill_done or context_gone):
            return view
        waiting_prefill, running_prefill = view.waiting_prefill_tokens, view.running_prefill_tokens
        return replace(
            view, num_running=max(0, running - max(0, num_ended)),
            num_waiting=max(0, waiting - max(min(0, num_ended), num_ended - running)),
            waiting_prefill_tokens=max(0, waiting_prefill - prefill_done),
            running_prefill_tokens=max(0, running_prefill - max(0, prefill_done - waiting_prefill)),
            decode_context_tokens=max(0, view.decode_context_tokens - context_gone))

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the pool that running sequences hold; 0 while unknown."""
        blocks = self.report.blocks if self.report is not None else None
        return blocks.used / blocks.total if blocks is not None and blocks.total else 0.0


def _cpu_of(report: object) -> Cpu | None:
    return report.cpu if isinstance(report, WorkerReport) else None


class ModelService(NamedTuple):
    """Who serves a model now, and what follows for its prompts: the hash schemes in use (usually one), the longest
    context of all, and what stands in the block hashes of an adapter's prompts."""

    endpoints: tuple[Endpoint, ...]
    schemes: tuple[HashScheme, ...]
    max_context: int | None
    adapter_keys: tuple[ExtraKey, ...]


class EndpointTable:
    """Endpoints by id, in the order of the configuration; `unseen`: what other gateways send there."""

    def __init__(self, workers: tuple[DiscoveredWorker, ...]) -> None:
        self._endpoints = {worker.endpoint_id: Endpoint(worker) for worker in workers}
        self._services: dict[str, ModelService] = {}  # of models that are served
        self._services_at = -1
        self.unseen = UnseenWork()
        self._fading = FadingRates()
        self._core_sets: tuple[CoreSet, ...] = ()
        self._core_sets_at = -1

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    def add(self, worker: DiscoveredWorker) -> None:
        """One more worker, under an id that is free. Whoever goes through the table goes on with what it was."""
        assert worker.endpoint_id not in self._endpoints, "two workers of one id"
        self._endpoints = {**self._endpoints, worker.endpoint_id: Endpoint(worker)}
        _Changes.count += 1
        _Changes.of_cores += 1

    def remove(self, endpoint_id: str) -> None:
        """One worker less. Requests under way there keep what they hold of it."""
        self._endpoints = {known: endpoint for known, endpoint in self._endpoints.items() if known != endpoint_id}
        self._fading.forget(endpoint_id)
        _Changes.count += 1
        _Changes.of_cores += 1

    def fade_rates(self, endpoint: Endpoint, now: float) -> None:
        """After a report came: how much its rates still count (fading_rates.py)."""
        report = endpoint.report
        assert report is not None, "no report came"
        rates, load = report.rates, report.load
        has_work = load.running or load.waiting or endpoint.own_load_at_report.num_inflight
        self._fading.saw(endpoint.endpoint_id, report.model,
                         ReportedRates(rates.prefill_tokens_per_s, rates.decode_step_s),
                         has_work=bool(has_work), now=now)
        faded = self._fading.faded(endpoint.endpoint_id, now)
        if faded != endpoint.faded_rates:
            endpoint.faded_rates = faded

    def forget_rates(self, endpoint: Endpoint) -> None:
        """Another process answers there: no doubt of the former one's concerns it."""
        self._fading.forget(endpoint.endpoint_id)
        endpoint.faded_rates = None

    def tried(self, endpoint: Endpoint, now: float) -> None:
        """A request goes there: from now on its reported rates count, until they have aged anew."""
        if endpoint.faded_rates is not None:
            self._fading.tried(endpoint.endpoint_id, now)
            endpoint.faded_rates = None

    def get(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint called so, if there is one."""
        return self._endpoints.get(endpoint_id)

    def serving(self, model: str) -> tuple[Endpoint, ...]:
        """Who may take a new request for this model: the ready ones, or failing those the incompatible ones.

        Of workers with different adapters under one name, those with the first one's: a name means one thing.
        """
        return self.service(model).endpoints

    def offering(self, model: str) -> tuple[Endpoint, ...]:
        """serving(), or where there are none, those that drain: the model is still theirs, though it gets no more."""
        return self.serving(model) or tuple(endpoint for endpoint in self.joined(model)
                                            if endpoint.state is EndpointState.DRAINING)

    def service(self, model: str) -> ModelService:
        """serving(), and what follows from it."""
        if self._services_at != _Changes.count:
            self._services_at = _Changes.count
            self._services.clear()
        service = self._services.get(model)
        if service is None:
            service = self._service(model)
            if service.endpoints:
                self._services[model] = service
        return service

    def core_sets(self) -> tuple[CoreSet, ...]:
        """Workers of whatever model that have more threads than the cores that they share."""
        if self._core_sets_at != _Changes.of_cores:
            self._core_sets_at = _Changes.of_cores
            self._core_sets = crowded(endpoint.cpu_share for endpoint in self if endpoint.cpu_share is not None)
        return self._core_sets

    def crowding(self, loads: Mapping[str, LoadView]) -> dict[str, Crowding]:
        """How busy such cores are, with these loads in the ledger."""
        if not (core_sets := self.core_sets()):
            return {}
        views = {endpoint_id: self._endpoints[endpoint_id].view(loads.get(endpoint_id, NO_LOAD))
                 for core_set in core_sets for endpoint_id in core_set.threads}
        return crowding_of(core_sets, views, loads)

    def _service(self, model: str) -> ModelService:
        ours = [endpoint for endpoint in self if endpoint.serves(model)]
        ready = [endpoint for endpoint in ours if endpoint.state is EndpointState.READY]
        serving = ready or [endpoint for endpoint in ours if endpoint.state is EndpointState.INCOMPATIBLE]
        serving = [endpoint for endpoint in serving
                   if endpoint.adapters.get(model) == serving[0].adapters.get(model)]
        # Where hashes mean nothing for a worker, its knowledge is none whatever its feed is doing.
        schemes = dict.fromkeys(endpoint.scheme for endpoint in serving
                                if endpoint.scheme is not None and endpoint.knowledge is not Knowledge.NONE)
        digest = serving[0].adapters.get(model) if serving else None
        return ModelService(
            tuple(serving), tuple(schemes),
            max((endpoint.report.max_context for endpoint in serving if endpoint.report is not None), default=None),
            () if digest is None else (ExtraKey(ExtraKeyKind.LORA, bytes.fromhex(digest)),))

    def views(self, endpoints: Sequence[Endpoint], loads: Mapping[str, LoadView]) -> list[EndpointView]:
        """Each one's view(), with its load. Most are as they were when they were last asked for."""
        views, count = [], _Changes.count
        for endpoint in endpoints:
            load, seen = loads.get(endpoint.endpoint_id, NO_LOAD), endpoint._seen
            if (seen is None or seen.own_load is not load or seen.count != count
                    or seen.in_sequence is not endpoint.feed.in_sequence):
                views.append(endpoint.view(load))
            else:
                views.append(seen.view)
        return views

    def same_scheme(self, scheme: HashScheme | None) -> HashScheme | None:
        """The object that stands for this scheme at other endpoints: equal ones are then one, and cheap to tell."""
        return next((endpoint.scheme for endpoint in self if endpoint.scheme == scheme), scheme)

    def joined(self, model: str) -> list[Endpoint]:
        """Every worker of this model that has been understood, in whatever state it is now."""
        return [endpoint for endpoint in self if endpoint.serves(model) and endpoint.epoch is not None]

    def model_behind(self, name: str) -> str:
        """The model that an adapter belongs to; any other name as it is."""
        for endpoint in self._endpoints.values():
            if name in endpoint.adapters and endpoint.model is not None:
                return endpoint.model
        return name

    def knows(self, model: str) -> bool:
        """Whether some worker has been seen to serve this model."""
        for endpoint in self._endpoints.values():
            report = endpoint.report
            if report is not None and (report.model == model or model in report.adapters):
                return True
        return False

    def models(self) -> list[str]:
        """Names of the models that some worker has been seen to serve."""
        return list(dict.fromkeys(name for endpoint in self if endpoint.model is not None
                                  for name in (endpoint.model, *endpoint.adapters)))
