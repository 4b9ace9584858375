"""Decides what the next step computes, and takes in what it computed.

Owns every sequence from submit() to its last update, and through the pool every block they hold. It never touches a
tensor, a clock, a random number or a socket: the simulator runs this very code.

There is no prefill or decode phase. A step moves num_computed_tokens of some sequences towards their num_tokens,
under one token budget: sequences that need one position first, then running ones that need more, then admissions; but
a more urgent sequence is admitted before a less urgent one's prefill goes on.

- A sequence is admitted only when all it has to compute fits, and is never the reason for a preemption.
- A running sequence that finds no block preempts the least urgent one, the last admitted first, never one ahead of
  itself. The victim's sealed blocks stay cached, so that its return finds most of its work done.
- Whoever needs what a more urgent one is computing follows it: before admission in the waiting room, afterwards by
  leaving it the block and taking it over when it is sealed.
- Nothing is sealed before commit() says that it was computed. So a failed step leaves no trace in the cache.
- One step is in flight from schedule() to commit() or shrink_step(); who takes part keeps its blocks until then.
"""

from __future__ import annotations

import math

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
from worker.core.prefill_pace import TOKENS_MIN
from worker.core.running_set import RunningSet
from worker.core.scheduler_config import (
    Batching,
    KvCacheMode,
    Refusal,
    RefusalReason,
    SchedulerConfig,
    SchedulerCounters,
    refusal_of,
)
from worker.core.sequence import Sequence
from worker.core.step_draft import StepDraft
from worker.core.step_limits import StepLimits
from worker.core.waiting_room import WaitingRoom
from worker.core.waste import Waste, waste_of
from worker.protocol.cache_events import CacheEvent

__all__ = ["Batching", "KvCacheMode", "Refusal", "RefusalReason", "Scheduler", "SchedulerConfig",
           "SchedulerCounters"]


class Scheduler:
    """One pool's scheduler. Not thread-safe: the engine's loop alone calls it."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        if pool.caching != (config.kv_cache is KvCacheMode.FULL):
            raise ValueError(f"kv_cache is {config.kv_cache}, but the pool's caching is {pool.caching}: "
                             "only 'full' caches")
        self.pool = pool
        self.config = config
        self.counters = SchedulerCounters()
        self.pace = config.pace  # the engine corrects it as it learns what steps cost
        self._waiting = WaitingRoom(pool, config)
        self._running = RunningSet(config.max_preemptions)
        self._aborting: set[int] = set()
        self._in_flight: StepPlan | None = None
        self._num_steps_planned = 0
        self._preempted_since: list[Preemption] = []  # between steps; the next plan tells of them
        self._watermark_blocks = math.ceil(config.watermark * pool.num_blocks)
        # As many sequences as positions, or decodes could starve a prefill.
        self._limits = StepLimits(max_tokens=config.max_batch_tokens,
                                  max_running=min(config.max_running, config.max_batch_tokens))

    # --- what the engine asks for -------------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """The longest prompt plus output, in tokens, that can always finish here."""
        holds = self.pool.num_blocks * self.pool.block_size
        return holds if self.config.max_context is None else min(holds, self.config.max_context)

    def submit(self, sequence: Sequence) -> Refusal | None:
        """Queue a sequence with a new seq_id; None when it was taken. A refused one may be submitted again."""
        refusal = refusal_of(sequence, self.max_context)
        if refusal is not None:
            return refusal
        if self._waiting.is_full:
            return Refusal(RefusalReason.QUEUE_FULL, self.config.max_waiting, self.config.max_waiting + 1)
        if self.pool.caching and sequence.prompt_output is None:
            sequence.chain = ContentChain(self.pool.scheme, sequence.extra_keys)
            sequence.chain.append(sequence.token_ids)
            self.pool.release(self.pool.match(sequence.chain.blocks))  # asked for again: the last to be evicted
        self._waiting.push(sequence)
        return None

    def abort(self, seq_id: int) -> SequenceUpdate | None:
        """End a sequence wherever it is; its blocks are free by the end of the running step.

        The update when it ended at once. None when it is unknown or has ended, or when it is part of the step in
        flight: then commit() or shrink_step() returns its update.
        """
        sequence = self._running.get(seq_id)
        if sequence is None:
            waiting = self._waiting.find(seq_id)
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
        draft = StepDraft(self._limits.max_tokens, self.pool.block_size, self.pace)
        draft.preemptions, self._preempted_since = self._preempted_since, []
        self._waiting.gate.begin_pass()
        at_once, after_more_urgent = self._running.ranked_for_step(self._waiting.first_priority)
        self._continue_all(at_once, draft)
        if not draft.preemptions or not self._running:  # whoever stayed after a step that did not fit may have left
            self._admit(draft)
        self._continue_all(after_more_urgent, draft)
        self._in_flight = draft.plan(self._num_steps_planned)
        self._num_steps_planned += self._in_flight is not None
        return self._in_flight

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """The step was computed: seal what is complete, append the sampled tokens, end what is done.

        Who failed ends with "error" ("abort" if it was aborted meanwhile) and is not tried again: it would fail every
        step to come. Nothing its share may have half written is published; what earlier steps sealed was never
        written to.
        """
        plan = self._land(result.step_id)
        self.counters.steps += 1
        self.counters.failed_shares += len(result.failed)
        self._limits.fitted()
        updates = []
        for share in plan.sequences:
            sequence = self._running[share.seq_id]
            failed, aborted = share.seq_id in result.failed, share.seq_id in self._aborting
            if not failed:
                self._advance(sequence, share)
            if failed or aborted:
                updates.append(self._end(sequence, FinishReason.ABORT if aborted else FinishReason.ERROR))
            elif share.samples:
                updates.append(self._take_token(sequence, result.sampled[share.seq_id]))
        return updates

    def shrink_step(self, plan: StepPlan) -> list[SequenceUpdate]:
        """The step did not fit into memory: it is planned anew, at half its size, and nobody ends for it (but who was
        aborted meanwhile). The least urgent sequences are preempted; larger steps come back by and by."""
        planned = self._land(plan.step_id)
        self.counters.shrunk_steps += 1
        aborted = [share.seq_id for share in planned.sequences if share.seq_id in self._aborting]
        updates = [self._end(self._running[seq_id], FinishReason.ABORT) for seq_id in aborted]
        self._limits.shrink(num_tokens=planned.num_tokens, num_sequences=len(planned.sequences))
        ranked = self._running.ranked()
        for victim in ranked[self._limits.max_running:]:
            if not self._running.is_protected(victim):
                self._preempt(victim, ranked[0], self._preempted_since)
        return updates

    def reset_cache(self) -> None:
        """Forget every cached block that no running sequence holds."""
        self._waiting.give_up_claims()
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
        return self._running.prefill_tokens

    @property
    def decode_context_tokens(self) -> int:
        """Tokens whose K/V the decoding sequences read in a step."""
        return self._running.decode_context_tokens

    @property
    def token_budget(self) -> int:
        """Prompt positions that a step computes beside decoding, at the beginning of a prompt."""
        in_time = self._limits.max_tokens if self.pace is None else self.pace.tokens_within(self.pace.target_s, 0)
        return min(self._limits.max_tokens, max(TOKENS_MIN, in_time))

    def waste(self) -> Waste:
        """What of the running sequences' blocks holds nothing of use."""
        return waste_of(self._running.values(), self.pool.block_size)

    @property
    def num_claimed_blocks(self) -> int:
        """Blocks that waiting sequences hold, each counted once."""
        return self._waiting.claims.num_blocks

    def check_invariants(self) -> None:
        """AssertionError when sequences and pool disagree. O(blocks): for tests, and for idle moments."""
        self.pool.check_invariants()
        claims = self._waiting.claims
        assert claims.num_blocks <= claims.max_blocks, "claims cover more than they may"
        holders = self._running.check_invariants(self.pool.block_size) + claims.holders()
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id], f"block {block_id}: holders and count differ"
        assert all(not waiting.block_table for waiting in self._waiting), "a waiting sequence holds blocks"
        assert self._aborting <= self._running.keys()

    # --- submit and end -----------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason) -> SequenceUpdate:
        self._running.pop(sequence.seq_id, None)
        self._aborting.discard(sequence.seq_id)
        self._waiting.forget(sequence)
        self.pool.release(sequence.block_table)
        sequence.drop_blocks()
        return SequenceUpdate(sequence.seq_id, finish_reason=reason)

    # --- the step: those that run -------------------------------------------------------------------------------

    def _continue_all(self, sequences: list[Sequence], draft: StepDraft) -> None:
        for sequence in sequences:
            if sequence.seq_id in self._running:  # it may have been preempted for one before it
                self._continue(sequence, draft)

    def _continue(self, sequence: Sequence, draft: StepDraft) -> None:
        if sequence.num_remaining_tokens > 1 and self._follows(sequence, draft):
            return
        num_tokens = draft.share_of(sequence)
        if num_tokens and self._cover(sequence, sequence.num_computed_tokens + num_tokens, draft):
            draft.add(sequence)
            self._waiting.gate.add_leader(sequence)

    def _follows(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Take over what others have sealed meanwhile; whether somebody in this step computes what comes next."""
        num_sealed, contents = sequence.num_sealed_blocks, _contents(sequence)
        behind = sequence.block_table[num_sealed - 1] if num_sealed else None
        found = self.pool.match(map(contents.__getitem__, range(num_sealed, len(contents))), behind=behind)
        if found:
            before = sequence.num_computed_tokens
            self.pool.release(sequence.adopt(found, self.pool.block_size))
            self.counters.adopted(sequence, sequence.num_computed_tokens - before)
        leader = self._waiting.gate.leader_of(sequence, sequence.block_table[:sequence.num_sealed_blocks])
        return leader is not None and leader in draft and sequence.num_remaining_tokens > 1

    def _cover(self, sequence: Sequence, num_positions: int, draft: StepDraft) -> bool:
        """Make the block table reach over `num_positions`, at others' expense if need be; False: at its own."""
        num_missing = self._num_blocks(num_positions) - len(sequence.block_table)
        while num_missing > 0:
            if self._acquire(sequence, num_missing, draft):
                break
            if self._waiting.give_up_a_claim():
                continue
            victim = self._running.victim(sequence, draft, self.pool)
            self._preempt(victim, sequence, draft.preemptions)
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

    def _preempt(self, victim: Sequence, needy: Sequence, preemptions: list[Preemption]) -> None:
        num_freed = self.pool.num_held_alone(victim.block_table)
        preemptions.append(Preemption(victim.seq_id, needy.seq_id, num_freed, victim.num_computed_tokens))
        self.counters.preemptions += 1
        num_sealed = victim.num_sealed_blocks
        self.pool.release(victim.block_table)
        victim.preempt()
        del self._running[victim.seq_id]
        self._waiting.requeue(victim, num_sealed_blocks=num_sealed)

    # --- the step: those that are admitted ----------------------------------------------------------------------

    def _admit(self, draft: StepDraft) -> None:
        self._waiting.gate.begin_pass(self._running.values())
        for sequence in self._waiting.candidates(self._running.keys()):
            if not draft.num_tokens_left or len(self._running) >= self._limits.max_running:
                break
            found = self._waiting.look_up(sequence, self._running.keys())
            if found is None:
                continue
            # First come first served: nobody slips past a sequence that waits for room.
            if not self._has_share(sequence, found, draft) or not self._make_fit(sequence, found):
                break
            self._start(sequence, draft)
            self._waiting.gate.add_leader(sequence)
        self._waiting.protect()

    def _has_share(self, sequence: Sequence, found: Matchable, draft: StepDraft) -> bool:
        start = min(len(found.block_ids) * self.pool.block_size, sequence.num_tokens - 1)
        return draft.share(start, sequence.num_tokens - start) > 0

    def _make_fit(self, sequence: Sequence, found: Matchable) -> bool:
        """Whether all it has to compute fits, if need be without what those behind it in the queue claim.

        What it matched and does not hold counts as available until it is pinned: subtract it.
        """
        num_fresh = self._num_blocks_at_admission(sequence) - len(found.block_ids)
        reserve = self._watermark_blocks if self._running else 0
        while self.pool.num_available - found.num_idle - num_fresh < reserve:
            if not self._waiting.give_up_a_claim(keep=sequence):
                return False
            found = self._waiting.claims.found(sequence)
        return True

    def _num_blocks_at_admission(self, sequence: Sequence) -> int:
        is_protected = self._running.is_protected(sequence)
        return self._num_blocks(sequence.num_tokens_max if is_protected else sequence.num_tokens)

    def _start(self, sequence: Sequence, draft: StepDraft) -> None:
        self._waiting.admit(sequence)
        matched = self._waiting.take_matched(sequence)
        sequence.take_matched(matched, self.pool.block_size)
        taken = self._acquire(sequence, self._num_blocks_at_admission(sequence) - len(matched), draft)
        assert taken, "_make_fit() said there was room"
        if sequence.num_preemptions:
            self.pool.forgive(_contents(sequence)[len(matched):])
        if sequence.num_cached_tokens is None:
            self.counters.admitted(sequence, counts=self.pool.caching)
        self._running[sequence.seq_id] = sequence
        draft.add(sequence)

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
