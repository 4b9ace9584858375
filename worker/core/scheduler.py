"""Decides what the next step computes, and takes in what it computed.

Owns every sequence from submit() to its last update, and through the pool every block they hold. It never touches a
tensor, a clock, a random number or a socket: the simulator runs this very code.

There is no prefill or decode phase. A step moves num_computed_tokens of some sequences towards their num_tokens,
under one token budget: sequences that need one position first, then running ones that need more, then admissions.

- A sequence is admitted only when all it has to compute fits, and is never the reason for a preemption.
- A running sequence that finds no block preempts the least urgent one, the last admitted first, never one ahead of
  itself. The victim's sealed blocks stay cached, so that its return finds most of its work done.
- Nothing is sealed before commit() says that it was computed. So a failed step leaves no trace in the cache.
- One step is in flight from schedule() to commit() or fail_step(); who takes part in it keeps its blocks until then.
"""

from __future__ import annotations

import math
from collections import Counter

from worker.core.batch import (
    FinishReason,
    Preemption,
    SampledToken,
    ScheduledSequence,
    SequenceUpdate,
    StepPlan,
    StepResult,
)
from worker.core.block_content import BlockContent, ContentChain
from worker.core.block_pool import BlockPool, Matchable
from worker.core.scheduler_config import KvCacheMode, Refusal, RefusalReason, SchedulerConfig, SchedulerCounters
from worker.core.sequence import Sequence
from worker.core.step_draft import StepDraft
from worker.core.twins import TwinGate
from worker.core.waiting_queue import WaitingQueue
from worker.protocol.cache_events import CacheEvent

__all__ = ["KvCacheMode", "Refusal", "RefusalReason", "Scheduler", "SchedulerConfig", "SchedulerCounters"]


class Scheduler:
    """One pool's scheduler. Not thread-safe: the engine's loop alone calls it."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        if pool.caching != (config.kv_cache is KvCacheMode.FULL):
            raise ValueError(f"kv_cache is {config.kv_cache}, but the pool's caching is {pool.caching}: "
                             "only 'full' caches")
        self.pool = pool
        self.config = config
        self.counters = SchedulerCounters()
        self._waiting = WaitingQueue(config.max_waiting)
        self._running: dict[int, Sequence] = {}  # in the order of admission
        self._aborting: set[int] = set()
        self._gate = TwinGate()
        self._in_flight: StepPlan | None = None
        self._num_steps_planned = 0
        self._watermark_blocks = math.ceil(config.watermark * pool.num_blocks)
        self._max_running = min(config.max_running, config.max_batch_tokens)  # or decodes could starve a prefill

    # --- what the engine asks for -------------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """The longest prompt plus output, in tokens, that can always finish here."""
        holds = self.pool.num_blocks * self.pool.block_size
        return holds if self.config.max_context is None else min(holds, self.config.max_context)

    def submit(self, sequence: Sequence) -> Refusal | None:
        """Queue a sequence with a new seq_id; None when it was taken. A refused one may be submitted again."""
        refusal = self._refusal(sequence)
        if refusal is not None:
            return refusal
        if self.pool.caching:
            sequence.chain = ContentChain(self.pool.scheme, sequence.extra_keys)
            sequence.chain.append(sequence.token_ids)
        self._waiting.push(sequence)
        self._note_uncached(sequence, len(self.pool.matchable(_contents(sequence)).block_ids))
        return None

    def abort(self, seq_id: int) -> SequenceUpdate | None:
        """End a sequence wherever it is; its blocks are free by the end of the running step.

        The update when it ended at once. None when it is unknown or has ended, or when it is part of the step in
        flight: then commit() or fail_step() returns its update.
        """
        sequence = self._running.get(seq_id)
        if sequence is None:
            waiting = next((waiting for waiting in self._waiting if waiting.seq_id == seq_id), None)
            if waiting is None:
                return None
            self._waiting.remove(waiting)
            return self._end(waiting, FinishReason.ABORT)
        if self._in_flight is not None and any(share.seq_id == seq_id for share in self._in_flight.sequences):
            self._aborting.add(seq_id)
            return None
        return self._end(sequence, FinishReason.ABORT)

    def schedule(self) -> StepPlan | None:
        """The next step; None when no sequence is left."""
        assert self._in_flight is None, "commit or fail the step in flight first"
        draft = StepDraft(self.config.max_batch_tokens, self.pool.block_size)
        for sequence in self._ranked_for_step():
            if sequence.seq_id in self._running:  # it may have been preempted for one before it
                self._continue(sequence, draft)
        if not draft.preemptions:
            self._admit(draft)
        self._in_flight = draft.plan(self._num_steps_planned)
        self._num_steps_planned += self._in_flight is not None
        return self._in_flight

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """The step was computed: seal what is complete, append the sampled tokens, end what is done."""
        plan = self._land(result.step_id)
        self.counters.steps += 1
        updates = []
        for share in plan.sequences:
            sequence = self._running[share.seq_id]
            self._advance(sequence, share)
            if sequence.seq_id in self._aborting:
                updates.append(self._end(sequence, FinishReason.ABORT))
            elif share.samples:
                updates.append(self._take_token(sequence, result.sampled[share.seq_id]))
        return updates

    def fail_step(self, plan: StepPlan) -> list[SequenceUpdate]:
        """The runner raised. Every sequence of `plan` ends with "error" ("abort" if it was aborted meanwhile).

        They are not retried: one of them may be the cause, and would fail every step to come. A caller that knows
        whose fault it was passes the plan narrowed to those: the others only lose this step and compute it again.
        Nothing the step may have half written is published; what earlier steps sealed was never written to.
        """
        planned = self._land(plan.step_id)
        self.counters.failed_steps += 1
        failed = {share.seq_id for share in plan.sequences}
        updates = []
        for share in planned.sequences:
            if share.seq_id in self._aborting:
                updates.append(self._end(self._running[share.seq_id], FinishReason.ABORT))
            elif share.seq_id in failed:
                updates.append(self._end(self._running[share.seq_id], FinishReason.ERROR))
        return updates

    def reset_cache(self) -> None:
        """Forget every cached block that no running sequence holds."""
        self.pool.reset()

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, in order."""
        return self.pool.take_events()

    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Positions the waiting sequences will have to compute, each less what was cached when last looked at."""
        return sum(sequence.num_uncached_tokens for sequence in self._waiting)

    @property
    def running_prefill_tokens(self) -> int:
        """Positions the running sequences have to compute before each can sample, decodes left out."""
        return sum(s.num_remaining_tokens for s in self._running.values() if s.num_remaining_tokens > 1)

    @property
    def decode_context_tokens(self) -> int:
        """Tokens whose K/V the decoding sequences read in a step."""
        return sum(s.num_tokens for s in self._running.values() if s.num_remaining_tokens == 1)

    def check_invariants(self) -> None:
        """AssertionError when sequences and pool disagree. O(blocks): for tests, and for idle moments."""
        self.pool.check_invariants()
        holders: Counter[int] = Counter()
        for sequence in self._running.values():
            holders.update(sequence.block_table)
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block is twice in one table"
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self.pool.block_size
            assert sequence.num_sealed_blocks * self.pool.block_size <= sequence.num_computed_tokens + 1
            assert sequence.num_cached_tokens is not None
            assert 0 <= sequence.num_cached_tokens < sequence.num_prompt_tokens
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id], f"block {block_id}: holders and count differ"
        assert all(not waiting.block_table for waiting in self._waiting), "a waiting sequence holds blocks"
        assert self._aborting <= self._running.keys()

    # --- submit and end -----------------------------------------------------------------------------------------

    def _refusal(self, sequence: Sequence) -> Refusal | None:
        if sequence.num_prompt_tokens < 1:
            return Refusal(RefusalReason.EMPTY_PROMPT, 1, sequence.num_prompt_tokens)
        if sequence.stop_rule.max_new_tokens <= sequence.num_resumed_tokens:
            return Refusal(RefusalReason.NO_NEW_TOKENS, sequence.num_resumed_tokens + 1,
                           sequence.stop_rule.max_new_tokens)
        if sequence.num_tokens_max > self.max_context:
            return Refusal(RefusalReason.TOO_LONG, self.max_context, sequence.num_tokens_max)
        if self._waiting.is_full:
            return Refusal(RefusalReason.QUEUE_FULL, self.config.max_waiting, self.config.max_waiting + 1)
        return None

    def _end(self, sequence: Sequence, reason: FinishReason) -> SequenceUpdate:
        self._running.pop(sequence.seq_id, None)
        self._aborting.discard(sequence.seq_id)
        self._gate.forget(sequence)
        self._waiting.forget(sequence)
        self.pool.release(sequence.block_table)
        sequence.drop_blocks()
        return SequenceUpdate(sequence.seq_id, finish_reason=reason)

    # --- the step: those that run -------------------------------------------------------------------------------

    def _ranked(self) -> list[Sequence]:
        """The most urgent first, then the first admitted."""
        return sorted(self._running.values(), key=lambda sequence: sequence.priority)

    def _ranked_for_step(self) -> list[Sequence]:
        """Ranked, but whoever needs one position only goes before whoever needs more."""
        return sorted(self._ranked(), key=lambda sequence: sequence.num_remaining_tokens > 1)

    def _continue(self, sequence: Sequence, draft: StepDraft) -> None:
        num_tokens = draft.share_of(sequence)
        if num_tokens and self._cover(sequence, sequence.num_computed_tokens + num_tokens, draft):
            draft.add(sequence)

    def _cover(self, sequence: Sequence, num_positions: int, draft: StepDraft) -> bool:
        """Make the block table reach over `num_positions`, at others' expense if need be; False: at its own."""
        num_missing = self._num_blocks(num_positions) - len(sequence.block_table)
        while num_missing > 0:
            if self._acquire(sequence, num_missing, draft):
                break
            victim = self._victim(sequence, draft)
            self._preempt(victim, sequence, draft)
            if victim is sequence:
                return False
        return True

    def _acquire(self, sequence: Sequence, num_blocks: int, draft: StepDraft) -> bool:
        evictions_before = self.pool.num_evictions
        block_ids = self.pool.acquire(num_blocks)
        if block_ids is None:
            return False
        sequence.block_table += block_ids
        draft.note_evictions(sequence, self.pool.num_evictions - evictions_before)
        return True

    def _victim(self, needy: Sequence, draft: StepDraft) -> Sequence:
        """The least urgent, last admitted one that frees a block; in the end the needy one itself.

        Passed over: who has a share already, who was preempted often enough to own its blocks for good, and who
        shares every block with others, since its going would gain nothing.
        """
        for candidate in reversed(self._ranked()):
            if candidate is needy:
                break
            if candidate in draft or self._is_protected(candidate):
                continue
            if self.pool.num_held_alone(candidate.block_table):
                return candidate
        return needy

    def _is_protected(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= self.config.max_preemptions

    def _preempt(self, victim: Sequence, needy: Sequence, draft: StepDraft) -> None:
        num_freed = self.pool.num_held_alone(victim.block_table)
        draft.preemptions.append(Preemption(victim.seq_id, needy.seq_id, num_freed, victim.num_computed_tokens))
        self.counters.preemptions += 1
        num_sealed = victim.num_sealed_blocks
        self.pool.release(victim.block_table)
        victim.preempt()
        del self._running[victim.seq_id]
        self._waiting.requeue(victim)
        self._note_uncached(victim, num_sealed)

    # --- the step: those that are admitted ----------------------------------------------------------------------

    def _admit(self, draft: StepDraft) -> None:
        self._gate.begin_pass(self._running.values())
        for sequence in self._waiting:
            if not draft.num_tokens_left or len(self._running) >= self._max_running:
                return
            if self._gate.still_held(sequence, self._running.keys()):
                continue
            found = self.pool.matchable(_contents(sequence))
            num_after_leader = self._gate.hold(sequence, found.block_ids)
            self._note_uncached(sequence, num_after_leader or len(found.block_ids))
            if num_after_leader is not None:
                continue
            if not self._fits(sequence, found):
                return  # first come first served: nobody slips past a sequence that waits for room
            self._start(sequence, draft)
            self._gate.add_leader(sequence)

    def _fits(self, sequence: Sequence, found: Matchable) -> bool:
        """Whether all it has to compute fits. What it matched counts as available until it is pinned: subtract it."""
        num_fresh = self._num_blocks_at_admission(sequence) - len(found.block_ids)
        reserve = self._watermark_blocks if self._running else 0
        return self.pool.num_available - found.num_idle - num_fresh >= reserve

    def _num_blocks_at_admission(self, sequence: Sequence) -> int:
        return self._num_blocks(sequence.num_tokens_max if self._is_protected(sequence) else sequence.num_tokens)

    def _start(self, sequence: Sequence, draft: StepDraft) -> None:
        matched = self.pool.match(_contents(sequence))
        sequence.take_matched(matched, self.pool.block_size)
        taken = self._acquire(sequence, self._num_blocks_at_admission(sequence) - len(matched), draft)
        assert taken, "_fits() said there was room"
        if sequence.num_preemptions:
            self.pool.forgive(_contents(sequence)[len(matched):])
        if sequence.num_cached_tokens is None:
            self._account_admission(sequence)
        self._waiting.remove(sequence)
        self._gate.forget(sequence)
        self._running[sequence.seq_id] = sequence
        draft.add(sequence)

    def _account_admission(self, sequence: Sequence) -> None:
        """Once per sequence, after its blocks are in hand: 0 <= cached <= prompt - 1."""
        # Resumed outputs may be cached too: they are no prompt tokens.
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
        if self.pool.caching:
            self.counters.queried_tokens += sequence.num_prompt_tokens
            self.counters.hit_tokens += sequence.num_cached_tokens

    def _note_uncached(self, sequence: Sequence, num_cached_blocks: int) -> None:
        sequence.num_uncached_tokens = max(1, sequence.num_tokens - num_cached_blocks * self.pool.block_size)

    # --- what was computed --------------------------------------------------------------------------------------

    def _land(self, step_id: int) -> StepPlan:
        plan = self._in_flight
        assert plan is not None, "no step is in flight"
        assert plan.step_id == step_id, f"step {step_id} is not the one in flight, {plan.step_id}"
        self._in_flight = None
        return plan

    def _advance(self, sequence: Sequence, share: ScheduledSequence) -> None:
        num_again = sequence.advance(len(share.token_ids))
        self.counters.computed_positions += len(share.token_ids)
        self.counters.recomputed_preempted_tokens += num_again
        self._seal(sequence)

    def _seal(self, sequence: Sequence) -> None:
        """Publish the blocks that are full and computed, in order; a partial last block never is."""
        contents, table = _contents(sequence), sequence.block_table
        num_full = min(sequence.num_computed_tokens // self.pool.block_size, len(contents))
        for index in range(sequence.num_sealed_blocks, num_full):
            held = self.pool.seal(table[index], contents[index], parent=table[index - 1] if index else None)
            if held is None:
                return
            table[index] = held
            sequence.num_sealed_blocks += 1

    def _take_token(self, sequence: Sequence, sampled: SampledToken) -> SequenceUpdate:
        is_first = sequence.num_output_tokens == sequence.num_resumed_tokens
        sequence.append(sampled.token_id)
        reason = sequence.stop_rule.reason(sequence.num_output_tokens, sampled.token_id)
        if reason is not None:
            self._end(sequence, reason)
        elif self.config.kv_cache is KvCacheMode.OFF:
            sequence.num_computed_tokens = 0
        return SequenceUpdate(
            seq_id=sequence.seq_id,
            token_ids=(sampled.token_id,),
            logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
            cached_tokens=sequence.num_cached_tokens if is_first else None,
            finish_reason=reason,
        )

    def _num_blocks(self, num_positions: int) -> int:
        return -(-num_positions // self.pool.block_size)


def _contents(sequence: Sequence) -> list[BlockContent]:
    return [] if sequence.chain is None else sequence.chain.blocks
