"""The worker's state as its HTTP routes see it: the phase it is in, the engine behind it, the requests it answers.

Owns the phase (loading, ready, draining, failed) and what becomes known when the model is ready. It is the one place
where the engine's reports arrive: events are published, outputs delivered, counters and log lines written, in that
order, once per step, with no await between. Routes read it; only `on_report` and the life-cycle methods write it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aiohttp import web

from worker.config import WorkerConfig
from worker.engine.engine_client import EngineClient
from worker.engine.messages import EngineFailed, EngineReady, EngineStats, Report, StepReport
from worker.prompt.renderer import PromptRenderer
from worker.prompt.token_bound import TokenBound, token_bound
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.api_error import ApiError
from worker.protocol.collector import collect_seldom
from worker.protocol.logs import get_logger
from worker.server.events_publisher import EventsPublisher
from worker.server.eviction_bursts import EvictionBursts
from worker.server.generation import Generation
from worker.server.metrics import WorkerMetrics
from worker.server.prompt_threads import PromptThreads
from worker.server.request_log import log_evictions, log_finished, log_preemption
from worker.server.request_table import RequestTable
from worker.server.token_text import TokenText

RETRY_AFTER_S = "1"
_log = get_logger("worker.server.shell")


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"     # not ready any more, so that routers look elsewhere; still accepting
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known once the model is loaded. Immutable for the life of the process. `adapters`: digests by name."""

    ready: EngineReady
    bundle: TokenizerBundle
    renderer: PromptRenderer
    token_text: TokenText
    token_bound: TokenBound | None
    model_names: frozenset[str]
    adapters: Mapping[str, bytes]
    system_fingerprint: str

    def shown_name(self, model: str | None) -> str:
        """What an answer says who gave it: the adapter that was asked for, or the model."""
        return model if model is not None and model in self.adapters else self.ready.model


class Shell:
    """Phases go loading -> ready -> leaving -> draining, and from any of them to failed; never back."""

    def __init__(self, config: WorkerConfig, engine: EngineClient, publisher: EventsPublisher) -> None:
        self.config = config
        self.engine = engine
        self.publisher = publisher
        self.metrics = WorkerMetrics()
        self.prompt_threads = PromptThreads()
        self.requests = RequestTable(self._on_released)
        self._evictions = EvictionBursts(
            lambda request_id, num_blocks: log_evictions(request_id, num_blocks, config.block_size))
        self.phase = Phase.LOADING
        self.port = config.port       # the one bound, once known: a configured 0 means any
        self.serving: Serving | None = None
        self.failure: EngineFailed | None = None
        self.failed = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._num_answering = 0
        self._opening: asyncio.Task[None] | None = None

    # -- for routes ---------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """The state after the last step; before the first one, an empty pool and the speeds of the warm-up."""
        ready = self.engine.ready
        if ready is None or self.engine.stats.blocks_total:
            return self.engine.stats
        return EngineStats(blocks_total=ready.num_blocks, blocks_free=ready.num_blocks,
                           prefill_tokens_per_s=ready.prefill_tokens_per_s, decode_step_s=ready.decode_step_s,
                           token_budget=ready.token_budget)

    def require_serving(self) -> Serving:
        """What the model is; ApiError 503 while there is none (yet, or any more)."""
        if self.phase is Phase.FAILED:
            reason = self.failure.message if self.failure is not None else "the engine has ended"
            raise ApiError(503, "worker_failed", f"This worker's engine has failed: {reason}")
        if self.serving is None:
            raise ApiError(503, "worker_loading", "The model is still loading; try again in a few seconds.",
                           headers={"Retry-After": RETRY_AFTER_S})
        return self.serving

    def require_engine(self) -> Serving:
        """As require_serving, and ApiError 503 while the engine gives no sign of life."""
        serving = self.require_serving()
        self.engine.require_heard()
        return serving

    def require_ready(self) -> Serving:
        """As require_accepting and require_engine, and ApiError 503 once the worker has been told to go."""
        if self.phase is Phase.LEAVING:
            raise _leaving()
        self.require_accepting()
        return self.require_engine()

    def require_accepting(self) -> Serving:
        """As require_serving, and ApiError 503 once the worker is being stopped: no new work."""
        if self.phase is Phase.DRAINING:
            raise _leaving()
        return self.require_serving()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around everything that answers a generating request: `idle` is set when there is no such thing."""
        self._num_answering += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if self._num_answering == 0:
                self.idle.set()

    # -- life ---------------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Say that this worker is going, and go on accepting: routers need a moment to notice. False: nobody was
        sent here yet, or is any more."""
        if self.phase is not Phase.READY:
            return False
        self.phase = Phase.LEAVING
        return True

    def drain(self) -> None:
        """Take no new requests from now on; those under way go on."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def cut_short(self) -> None:
        """The time for draining is over: whoever still waits for an answer gets an error."""
        self.requests.fail_all(ApiError(503, "worker_draining", "This worker shuts down; the answer ends here."))

    def fail(self, failure: EngineFailed) -> None:
        """The engine cannot go on: every client is told, /health fails, and the process is to end."""
        if self.phase is Phase.FAILED:
            return
        self.phase, self.failure = Phase.FAILED, failure
        self.requests.fail_all(ApiError(500, "worker_failed", "The worker's engine failed while it answered."))
        self.failed.set()

    # -- the engine's reports (event loop, once per step) -------------------------------------------------------

    def on_report(self, report: Report) -> None:
        """Called on the event loop by EngineClient. A report that cannot be taken leaves readers with a wrong index
        and clients without their tokens: that is fatal, and said so, instead of streams that never end."""
        try:
            self._take(report)
        except Exception:
            _log.exception("report_lost")
            self.fail(EngineFailed("This worker could not take a report of its engine; its log says why.", False))

    def _take(self, report: Report) -> None:
        match report:
            case EngineReady():
                self._opening = asyncio.get_running_loop().create_task(self._open(report), name="open-tokenizer")
            case EngineFailed():
                self.fail(report)
            case StepReport():
                self._on_step(report)

    def _on_step(self, report: StepReport) -> None:
        # Events first: whoever has seen a response may rely on its blocks being announced.
        self.publisher.publish(report.events)
        self.metrics.observe_step(report)
        for note in report.preemptions:
            log_preemption(note)
        self._evictions.add(report.evicted_for, report.evicted_blocks, time.monotonic())
        self.requests.deliver(report.outputs)

    def _on_released(self, generation: Generation) -> None:
        for stats in generation.stats:
            self.metrics.observe_sequence(stats)
        self._evictions.ended(generation.key)
        log_finished(generation)

    async def _open(self, ready: EngineReady) -> None:
        """From a loaded model to serving: tokenizer and template read, off the loop."""
        try:
            self.serving = await asyncio.to_thread(self._read_tokenizer, ready)
        except Exception as error:
            # The outermost edge of a task nobody awaits: without this the worker would look like loading for ever.
            _log.exception("tokenizer_unusable", folder=ready.folder)
            self.fail(EngineFailed(f"The tokenizer of {ready.model} cannot be read: {error}", users_fault=True))
            return
        self.metrics.observe_ready(ready, self.stats)
        self.publisher.open(topic=f"kv@{self.config.host}:{self.port}@{ready.model}")
        collect_seldom()
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY
        _log.info("ready", model=ready.model, max_context=ready.max_context, num_blocks=ready.num_blocks,
                  device=ready.device, dtype=ready.dtype, weight_dtype=ready.weight_dtype, kv_dtype=ready.kv_dtype,
                  exactness=ready.exactness, target_itl_ms=self.config.target_itl_ms, token_budget=ready.token_budget,
                  batching=self.config.batching, notes=list(ready.notes))

    def _read_tokenizer(self, ready: EngineReady) -> Serving:
        bundle = TokenizerBundle.from_directory(Path(ready.folder), self.config.chat_template)
        renderer = PromptRenderer(bundle)
        adapters = dict(ready.adapters)
        names = {ready.model, self.config.model, self.config.served_name or ready.model, *adapters}
        return Serving(ready=ready, bundle=bundle, renderer=renderer, token_text=TokenText(renderer.tokenizer),
                       token_bound=token_bound(bundle.tokenizer_json),
                       model_names=frozenset(names), adapters=adapters,
                       system_fingerprint="fp_" + ready.hash_scheme.digest()[:12])


def _leaving() -> ApiError:
    return ApiError(503, "worker_draining", "This worker is shutting down; ask another one.",
                    headers={"Retry-After": RETRY_AFTER_S})


SHELL: web.AppKey[Shell] = web.AppKey("shell", Shell)


def shell_of(request: web.Request) -> Shell:
    return request.app[SHELL]
