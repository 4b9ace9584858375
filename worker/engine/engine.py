"""The engine: schedule, run, commit, report. One step at a time, in one thread, testable without any process.

Owns the sequences at work. Whether two prompts share a block is core's business, what a token means is the model's:
the engine joins them, measures, and decides what becomes of a step that raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from worker.core.batch import FinishReason, SequenceUpdate, StepPlan
from worker.core.scheduler import Scheduler
from worker.core.sequence import PromptOutput, Sequence, StopRule
from worker.engine.engine_config import EngineConfig
from worker.engine.grammar import GrammarCompiler, GrammarError, Matcher
from worker.engine.live_sequence import LiveSequence
from worker.engine.messages import (
    AbortRequest,
    Command,
    EngineReady,
    EngineStats,
    PreemptionNote,
    ResetCache,
    SequenceOutput,
    Shutdown,
    StepReport,
    SubmitSequence,
)
from worker.engine.startup import EngineParts, start_up
from worker.engine.step_execution import Execution, Runner, execute, failed_outcome, probe
from worker.engine.timings import BandwidthMeter, EngineRates, SequenceTimings, StepTiming
from worker.prompt.sampling_params import SamplingParams

# Steps in a row in which nothing could be computed, after which the engine asks itself whether it still can.
FAILED_STEPS_MAX = 5
# A step that does not fit into memory is tried again at half its size, down to so many positions of one sequence.
IRREDUCIBLE_TOKENS = 16
DOES_NOT_FIT = "The engine has no memory left to compute this request, not even a small part at a time ({})."

Clock = Callable[[], float]
logger = logging.getLogger("headstart.engine")


class Engine:
    """`load()` once, then `apply` commands and `step` while not `idle`. `clock` gives monotonic seconds.

    `broken` says why no further step makes sense; None while all is well.
    """

    scheduler: Scheduler
    runner: Runner
    grammars: GrammarCompiler

    def __init__(self, config: EngineConfig, *, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._live: dict[int, LiveSequence] = {}
        self._seq_ids: dict[tuple[str, int], int] = {}
        self._next_seq_id = count(1)
        self._pending: list[SequenceOutput] = []      # ended outside a step; told with the next report
        self._eos_token_ids: frozenset[int] = frozenset()
        self._failed_steps = 0
        self._ran_until: float | None = None          # None: idle since
        self._rates = EngineRates()
        self.broken: str | None = None

    def load(self) -> EngineReady:
        """Load the model and warm it up. Raises EngineSetupError: one line with the remedy."""
        parts = start_up(self._config, self._clock)
        self.scheduler, self.runner, self._rates = parts.scheduler, parts.runner, parts.rates
        self._eos_token_ids = frozenset(parts.eos_token_ids)
        self.grammars, self._pacer, self._spec = parts.grammars, parts.pacer, parts.model.spec
        self._bandwidth = BandwidthMeter(parts.machine.read_bytes_per_s)
        return _ready(self._config, parts)

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to tell."""
        return not self._live and not self._pending

    # -- commands, between steps ---------------------------------------------------------------------------------

    def prepare(self, command: Command) -> None:
        """What a command needs and takes long; for a thread of its own, while a step may be running."""
        if isinstance(command, SubmitSequence) and command.grammar is not None:
            self.grammars.prepare(command.grammar)

    def apply(self, command: Command) -> None:
        match command:
            case SubmitSequence():
                try:
                    self.submit(command)
                except Exception as trouble:    # a request nobody foresaw must not end everybody's
                    logger.exception("request %s could not be taken", command.request_id)
                    self._refuse(command, repr(trouble))
            case AbortRequest():
                self.abort(command)
            case ResetCache():
                self.scheduler.reset_cache()
            case Shutdown():
                self.abort_all()

    def submit(self, command: SubmitSequence) -> None:
        """Queue a sequence. One that can never run ends with "error" in the next report."""
        key = (command.request_id, command.choice)
        if key in self._seq_ids:
            self._refuse(command, "its request id and choice are already at work")
            return
        try:
            matcher = self._matcher(command)
        except GrammarError as error:
            self._refuse(command, str(error), param=command.grammar.param if command.grammar else None)
            return
        sequence = Sequence(next(self._next_seq_id), command.prompt_token_ids, self._stop_rule(command),
                            extra_keys=command.extra_keys, priority=command.priority, choice=command.choice,
                            resumed_token_ids=command.generated_token_ids,
                            prompt_output=_prompt_output(command.params))
        sequence.tenant = command.tenant
        if (refusal := self.scheduler.submit(sequence)) is not None:
            self._refuse(command, f"{refusal.reason}, {refusal.actual} against a limit of {refusal.limit}")
            return
        timings = SequenceTimings(command.arrived_at or self._clock())
        self._live[sequence.seq_id] = LiveSequence(command, sequence, timings, matcher,
                                                         output_token_ids=command.generated_token_ids)
        self._seq_ids[key] = sequence.seq_id

    def _matcher(self, command: SubmitSequence) -> Matcher | None:
        """The grammar's matcher behind what was generated already. Raises GrammarError."""
        if command.grammar is None:
            return None
        matcher = self.grammars.matcher(command.grammar)
        if command.num_generated:
            matcher.advance(command.generated_token_ids)
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        return matcher

    def _stop_rule(self, command: SubmitSequence) -> StopRule:
        params, free = command.params, command.grammar is None
        return StopRule(command.max_new_tokens, command.stop_token_ids, self._eos_token_ids,
                        ignore_eos=params.ignore_eos and free, min_tokens=params.min_tokens if free else 0)

    def abort(self, command: AbortRequest) -> None:
        """End a request's sequences and free their blocks. Unknown ones are no news: they may just have finished."""
        seq_ids = [seq_id for (request_id, choice), seq_id in self._seq_ids.items()
                   if request_id == command.request_id and command.choice in (None, choice)]
        for seq_id in seq_ids:
            update = self.scheduler.abort(seq_id)
            assert update is not None, "between steps an abort takes effect at once"
            self._pending.append(self._output(update, self._clock()))

    def abort_all(self) -> None:
        for request_id in {live.command.request_id for live in self._live.values()}:
            self.abort(AbortRequest(request_id))

    def _refuse(self, command: SubmitSequence, why: str, *, param: str | None = None) -> None:
        self._pending.append(SequenceOutput(command.request_id, command.choice, [], finish_reason=FinishReason.ERROR,
                                            error=f"The engine did not take this request: {why}.",
                                            error_param=param))

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Compute one step, if there is anything to compute, and tell what came of everything since the last."""
        started_at = self._clock()
        plan = self.scheduler.schedule()
        pending, self._pending = self._pending, []
        if plan is None:
            assert not self._live, "sequences wait and none of them can run"
            return StepReport(outputs=pending, events=self.scheduler.take_events(), stats=self._stats())
        allocate_s = self._clock() - started_at
        preemptions = self._note_preemptions(plan)
        evicted_for = None if plan.evicted_for_seq_id is None else self._request_id(plan.evicted_for_seq_id)
        decode_rows = sum(self._live[share.seq_id].is_decode(share) for share in plan.sequences)

        rows = {share.seq_id: self._live[share.seq_id].sampler_row() for share in plan.sequences
                if share.samples or share.targets}
        run_at = self._clock()
        overhead_s = run_at - (started_at if self._ran_until is None else self._ran_until)
        execution = execute(self.runner, plan, rows)
        ended_at = self._clock()
        timing = StepTiming(allocate_s, execution.outcome.forward_s, execution.outcome.sample_s, ended_at)
        for share in plan.sequences:
            self._live[share.seq_id].worked(share, timing)
            self._live[share.seq_id].scored(share, execution.outcome.scored.get(share.seq_id, ()))
            self._live[share.seq_id].pooled(share, execution.outcome.pooled.get(share.seq_id))
        if not execution.outcome.errors and execution.out_of_memory is None:
            self._observe_rates(plan, timing, decode_rows)
        updates, errors = self._commit(plan, execution)
        outputs = [self._output(update, ended_at, errors.get(update.seq_id)) for update in updates]
        self._ran_until = ended_at if self._live else None
        return StepReport(
            outputs=pending + outputs, events=self.scheduler.take_events(), preemptions=preemptions,
            evicted_blocks=plan.num_blocks_evicted, evicted_for=evicted_for, stats=self._stats(),
            step_s=self._clock() - started_at, overhead_s=overhead_s,
            step_kind=_step_kind(decode_rows, len(plan.sequences)),
            batch_size=len(plan.sequences))

    def _commit(self, plan: StepPlan, execution: Execution) -> tuple[list[SequenceUpdate], dict[int, str]]:
        """Take the step in: tokens of those who have some, the end of those who failed (and why), or all of it again
        but smaller."""
        outcome = execution.outcome
        if execution.out_of_memory is not None:
            if plan.num_tokens > IRREDUCIBLE_TOKENS or len(plan.sequences) > 1:
                return self.scheduler.shrink_step(plan), {}
            outcome = failed_outcome(plan, {plan.sequences[0].seq_id: DOES_NOT_FIT.format(execution.out_of_memory)})
        self._failed_steps = self._failed_steps + 1 if len(outcome.errors) == len(plan.sequences) else 0
        if self._failed_steps >= FAILED_STEPS_MAX and (reason := probe(self.runner)) is not None:
            self.broken = f"{self._failed_steps} steps in a row failed; restart the worker. Last: {reason}"
        return self.scheduler.commit(outcome.result), outcome.errors

    def _observe_rates(self, plan: StepPlan, timing: StepTiming, decode_rows: int) -> None:
        step_s = timing.forward_s + timing.sample_s
        chunks = [(share.start, len(share.token_ids)) for share in plan.sequences
                  if not self._live[share.seq_id].is_decode(share)]
        if self._pacer is not None and chunks and decode_rows:
            self._pacer.observe(chunks=chunks, prefill_s=step_s - self._rates.decode_step_s)
            self.scheduler.pace = self._pacer.pace
        if not chunks:
            context = sum(share.start + 1 for share in plan.sequences)
            self._bandwidth.observe(num_bytes=self._spec.weights_read_bytes + context * self._spec.kv_bytes_per_token,
                                    step_s=step_s)
        self._rates.observe(prefill_tokens=sum(num_tokens for _, num_tokens in chunks), decode_rows=decode_rows,
                            step_s=step_s, at=timing.ended_at)

    def _note_preemptions(self, plan: StepPlan) -> list[PreemptionNote]:
        # One preempted for want of memory, after the last step, may have been aborted since.
        preemptions = [preemption for preemption in plan.preemptions
                       if preemption.seq_id in self._live and preemption.for_seq_id in self._live]
        for preemption in preemptions:
            self._live[preemption.seq_id].preempted(preemption)
        return [PreemptionNote(self._request_id(preemption.seq_id), self._request_id(preemption.for_seq_id),
                               preemption.num_blocks_freed, preemption.num_tokens_lost)
                for preemption in preemptions]

    def _output(self, update: SequenceUpdate, at: float, error: str | None = None) -> SequenceOutput:
        live = self._live[update.seq_id]
        try:
            output = live.output(update, at=at, error=error)
            if output.finish_reason is None and live.matcher is not None and live.matcher.error is not None:
                output = self._give_up(live, live.matcher, output)
        except Exception as trouble:    # its grammar or account: nothing its batch-mates should pay for
            logger.exception("request %s: its output could not be taken", live.command.request_id)
            self.scheduler.abort(update.seq_id)
            output = live.failed(f"The engine could not take this request's output: {trouble!r}")
        if output.finish_reason is not None:
            del self._live[update.seq_id]
            del self._seq_ids[live.command.request_id, live.command.choice]
        return output

    def _give_up(self, live: LiveSequence, matcher: Matcher, output: SequenceOutput) -> SequenceOutput:
        """The grammar's way on is beyond its limits: the sequence ends with what it has."""
        self.scheduler.abort(live.sequence.seq_id)
        return replace(output, finish_reason=str(FinishReason.ERROR), stats=live.account(),
                       error=f"The grammar could not be followed any further: {matcher.error}",
                       error_param=None if live.command.grammar is None else live.command.grammar.param)

    def _request_id(self, seq_id: int) -> str:
        return self._live[seq_id].command.request_id

    def _stats(self) -> EngineStats:
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.scheduler.counters
        waste = scheduler.waste()
        return EngineStats(
            blocks_total=pool.num_blocks, blocks_free=pool.num_free, blocks_cached=pool.num_idle,
            blocks_used=pool.num_referenced, num_running=scheduler.num_running, num_waiting=scheduler.num_waiting,
            waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
            running_prefill_tokens=scheduler.running_prefill_tokens,
            decode_context_tokens=scheduler.decode_context_tokens,
            computed_positions_total=counters.computed_positions, queried_tokens_total=counters.queried_tokens,
            hit_tokens_total=counters.hit_tokens, evictions_total=pool.num_evictions,
            preemptions_total=counters.preemptions, recomputed_preempted_total=counters.recomputed_preempted_tokens,
            recomputed_evicted_total=pool.num_recomputed_evicted_tokens, steps_total=counters.steps,
            shrunk_steps_total=counters.shrunk_steps, blocks_claimed=scheduler.num_claimed_blocks,
            waste_tail_slots=waste.tail, waste_reserved_slots=waste.reserved, waste_duplicate_slots=waste.duplicate,
            token_budget=scheduler.token_budget, memory_bandwidth_ratio=self._bandwidth.ratio,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s, decode_step_s=self._rates.decode_step_s)


def _prompt_output(params: SamplingParams) -> PromptOutput | None:
    if params.pools:
        return PromptOutput.EMBEDDING
    return None if params.prompt_logprobs is None else PromptOutput.SCORES


def _step_kind(decode_rows: int, num_rows: int) -> str:
    if decode_rows == 0:
        return "prefill"
    return "decode" if decode_rows == num_rows else "mixed"


def _ready(config: EngineConfig, parts: EngineParts) -> EngineReady:
    spec, pool = parts.model.spec, parts.scheduler.pool
    return EngineReady(
        folder=str(parts.folder.path), model=config.served_name or parts.folder.name, hash_scheme=pool.scheme,
        num_blocks=pool.num_blocks, block_size=pool.block_size, max_context=parts.scheduler.max_context,
        vocab_size=spec.vocab_size, eos_token_ids=parts.eos_token_ids, device=spec.device, dtype=spec.dtype,
        weight_dtype=spec.weight_dtype or spec.dtype,
        kv_dtype=spec.kv_dtype, kv_bytes_per_token=spec.kv_bytes_per_token, exactness=config.exactness,
        prefill_tokens_per_s=parts.rates.prefill_tokens_per_s, decode_step_s=parts.rates.decode_step_s,
        token_budget=parts.scheduler.token_budget, weights_bytes=spec.weights_bytes,
        activation_bytes=parts.machine.activation_bytes, other_bytes=parts.machine.other_bytes,
        read_bytes_per_s=parts.machine.read_bytes_per_s, notes=parts.notes,
        adapters=tuple((adapter.name, adapter.digest) for adapter in parts.adapters),
        cpu_threads=parts.cpu_threads)
