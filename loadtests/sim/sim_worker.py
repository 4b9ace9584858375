"""A simulated worker: worker.core's scheduler and pool, and a cost model instead of a model.

Owns one worker's steps on the virtual clock. It must never be asked between two steps without observe(): runs of
plain decode steps are skipped over, and observe() brings the scheduler to where the clock is. The instants of steps
are added up one by one in both ways of running, so that they are equal to the last bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loadtests.sim.block_store import Change, SimPool, SimScheduler
from loadtests.sim.clock import WORKER_STEP, VirtualClock
from loadtests.sim.cost_model import CostModel, pairs_of
from loadtests.sim.shared_cores import SharedCores
from loadtests.sim.sim_request import SimRequest
from worker.core.batch import SampledToken, StepPlan, StepResult
from worker.core.scheduler_config import SchedulerConfig
from worker.core.sequence import Sequence, StopRule
from worker.protocol.block_hash import HashScheme

OUTPUT_TOKENS_FROM = 1 << 31   # ids of generated tokens: never those of a prompt
SKIPPED_STEPS_MAX = 4096
RATE_DECAY = 0.9
PREFILL_SAMPLE_TOKENS_MIN = 32
FIXED_ROWS = 8
PAUSE_S = AGE_HALF_LIFE_S = 10.0
AGED_TOKENS_MIN = 256
WARM_UP_TOKENS = 1024


class Report(NamedTuple):
    """What GET /kv says of load and pool."""

    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    running_prefill_tokens: int
    decode_context_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    prefill_tokens_per_s: float
    decode_step_s: float
    step_tokens: int = 0


class Step(NamedTuple):
    """What a step computes and how long that takes: here, and with a core for itself."""

    began_at: float
    took_s: float
    alone_s: float
    prefill_tokens: int
    prefill_pairs: float
    decode_rows: int
    decode_context: int


@dataclass(slots=True)
class WorkerListener:
    """Whom to tell: (request, cached tokens) at the first token, (request) at the end, (changes) after a step; and
    who wants to know of each step that begins, where none are skipped over."""

    first_token: Callable[[SimRequest, int], None]
    finished: Callable[[SimRequest], None]
    changed: Callable[[list[Change]], None]
    began: Callable[[Step], None] | None = None


class SimWorker:
    """One worker process. `coalesce` False runs every step by itself: the same results, slower."""

    def __init__(self, worker_id: str, clock: VirtualClock, model: CostModel, *, num_blocks: int, scheme: HashScheme,
                 listener: WorkerListener, coalesce: bool = True, cores: SharedCores | None = None) -> None:
        self.worker_id = worker_id
        self.model = model
        self.busy_s = 0.0
        self.pool = SimPool(num_blocks, scheme)
        self.scheduler = SimScheduler(self.pool, SchedulerConfig(
            max_batch_tokens=model.max_batch_tokens, max_running=model.max_running, max_waiting=1 << 30))
        self._clock = clock
        self._listener = listener
        self._cores = cores
        self._coalesce = coalesce and cores is None   # what others do there changes how long steps take
        self._requests: dict[int, SimRequest] = {}
        self._tokens: dict[int, int] = {}
        self._plan: StepPlan | None = None
        self._planned_s = 0.0
        self._planned_from = 0.0
        self._planned_work = 0, 0
        self._plain_ends: list[float] = []   # instants at which the skipped-over steps end, and their lengths
        self._plain_lengths: list[float] = []
        self._is_stopped = False
        self._ticket = 0                     # of the wake-up that counts; earlier ones are stale
        # As after the warm-up of a worker that has been up for a while.
        self._prefill_tokens = float(WARM_UP_TOKENS)
        self._prefill_s = model.prefill_s(WARM_UP_TOKENS)
        self._decode_step_s = model.decode_step_s(1, WARM_UP_TOKENS)
        self._decode_rows = 1.0
        self._prefill_at: float | None = None

    def submit(self, request: SimRequest) -> bool:
        """A request arrives now; False when it can never fit."""
        self.observe()
        self._start_what_is_due()
        sequence = Sequence(request.index, request.token_ids(), StopRule(max_new_tokens=request.output_tokens),
                            priority=request.priority)
        if self.scheduler.submit(sequence) is not None:
            return False
        if self._cores is not None:
            self._cores.arrived()
        self._requests[request.index] = request
        self._tokens[request.index] = OUTPUT_TOKENS_FROM + request.index
        if self._plan is None:
            self._begin_step(self._clock.now)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether its process is gone."""
        return self._is_stopped

    def stop(self) -> list[SimRequest]:
        """The process is gone, now: what was under way, in order of arrival."""
        self.observe()
        self._is_stopped = True
        if self._cores is not None:
            self._cores.rest(self.worker_id)
        self._ticket += 1   # no step of it ends any more
        self._plain_ends, self._plain_lengths = [], []
        lost, self._requests = list(self._requests.values()), {}
        return lost

    def report(self) -> Report:
        """As of now."""
        self.observe()
        scheduler, pool = self.scheduler, self.pool
        return Report(scheduler.num_running, scheduler.num_waiting, scheduler.waiting_prefill_tokens,
                      scheduler.running_prefill_tokens, scheduler.decode_context_tokens, pool.num_blocks,
                      pool.num_free, pool.num_idle, self._prefill_tokens / self._prefill_s, self._decode_step_s,
                      scheduler.token_budget)

    def observe(self) -> None:
        """Bring the scheduler up to the steps that have ended by now."""
        ends = self._plain_ends
        if not ends or ends[0] > self._clock.now:
            return
        num_done = bisect_right(ends, self._clock.now)
        self._skip(num_done)
        self._plain_ends, self._plain_lengths = ends[num_done:], self._plain_lengths[num_done:]
        self._planned_from = ends[num_done - 1]

    def _start_what_is_due(self) -> None:
        """Something arrives inside a run of plain steps: the one under way becomes a step like any other."""
        if not self._plain_ends:
            return
        started_at = self._planned_from
        self._plain_ends, self._plain_lengths = [], []
        self._begin_real_step(started_at)

    def _begin_step(self, now: float) -> None:
        num_plain = min(self.scheduler.num_plain_steps(), SKIPPED_STEPS_MAX) if self._coalesce else 0
        if num_plain < 2:
            self._begin_real_step(now)
            return
        self._planned_from = now
        self._plain_ends, self._plain_lengths = self._plain_times(now, num_plain)
        self._wake_at(self._plain_ends[-1], self._end_plain_steps)

    def _plain_times(self, now: float, num_steps: int) -> tuple[list[float], list[float]]:
        rows, context, step_s = self.scheduler.num_running, self.scheduler.decode_context_tokens, self.model.step_s
        ends, lengths = [], []
        for _ in range(num_steps):
            length = step_s(0, 0.0, rows, context)
            now += length
            context += rows
            ends.append(now)
            lengths.append(length)
        return ends, lengths

    def _end_plain_steps(self) -> None:
        self.observe()
        self._begin_step(self._clock.now)

    def _skip(self, num_steps: int) -> None:
        self.scheduler.skip_plain_steps(num_steps, self._tokens)
        for length in self._plain_lengths[:num_steps]:
            self.busy_s += length
            self._learn(0, self.scheduler.num_running, length)

    def _begin_real_step(self, now: float) -> None:
        plan = self._plan = self.scheduler.schedule()
        if plan is None:
            if self._cores is not None:
                self._cores.rest(self.worker_id)
            return
        prefill, pairs, rows, context = 0, 0.0, 0, 0
        for share in plan.sequences:
            num_tokens = len(share.token_ids)
            if num_tokens == 1:
                rows += 1
                context += share.start + 1
            else:
                prefill += num_tokens
                pairs += pairs_of(share.start, num_tokens)
        alone_s = self._planned_s = self.model.step_s(prefill, pairs, rows, context)
        if self._cores is not None:
            self._planned_s = self._cores.begin(self.worker_id, alone_s, now)
        if self._listener.began is not None:
            self._listener.began(Step(now, self._planned_s, alone_s, prefill, pairs, rows, context))
        self._planned_work = prefill, rows
        self._wake_at(now + self._planned_s, self._end_real_step)

    def _end_real_step(self) -> None:
        plan = self._plan
        assert plan is not None, "a step ended that had not begun"
        self.busy_s += self._planned_s
        self._learn(*self._planned_work, self._planned_s)
        tokens = self._tokens
        sampled = {share.seq_id: SampledToken(tokens[share.seq_id]) for share in plan.sequences if share.samples}
        if self._cores is not None:
            self._cores.streamed(len(sampled))
        updates = self.scheduler.commit(StepResult(plan.step_id, sampled))
        self._plan = None
        for update in updates:
            request = self._requests[update.seq_id]
            if update.cached_tokens is not None:
                self._listener.first_token(request, update.cached_tokens)
            if update.finish_reason is not None:
                del self._requests[update.seq_id], tokens[update.seq_id]
                self._listener.finished(request)
        changes = self.pool.journal.take_changes()
        if changes:
            self._listener.changed(changes)
        self._begin_step(self._clock.now)

    def _wake_at(self, instant: float, action: Callable[[], None]) -> None:
        self._ticket += 1
        ticket = self._ticket
        self._clock.at(instant, lambda: action() if ticket == self._ticket else None, rank=WORKER_STEP)

    def _learn(self, prefill_tokens: int, decode_rows: int, step_s: float) -> None:
        """Running estimates of speed, as worker.engine.timings reports them: a test holds both equal."""
        if not prefill_tokens and decode_rows:
            self._decode_step_s = RATE_DECAY * self._decode_step_s + (1 - RATE_DECAY) * step_s
            self._decode_rows = RATE_DECAY * self._decode_rows + (1 - RATE_DECAY) * decode_rows
        elif prefill_tokens >= PREFILL_SAMPLE_TOKENS_MIN:
            growth = (decode_rows + FIXED_ROWS) / (self._decode_rows + FIXED_ROWS)
            decode_s = self._decode_step_s * max(1.0, growth) if decode_rows else 0.0
            own_s = max(step_s - decode_s, step_s * prefill_tokens / (prefill_tokens + decode_rows) / 4)
            kept = RATE_DECAY
            if self._prefill_at is not None and (pause_s := self._clock.now - self._prefill_at - PAUSE_S) > 0:
                least = min(1.0, AGED_TOKENS_MIN / self._prefill_tokens)
                kept *= max(least, 2.0 ** (-pause_s / AGE_HALF_LIFE_S))
            self._prefill_tokens = kept * self._prefill_tokens + prefill_tokens
            self._prefill_s = kept * self._prefill_s + own_s
            self._prefill_at = self._clock.now
