"""Two schedulers in step: one on the pool under test, one on the naive pool. They must never differ.

A fake runner computes every plan into an array and checks what each position reads. The pair itself knows every
sequence's tokens from its prompt and its updates alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import replace

from tests.support.fake_runner import FakeRunner, prefix_digests, reference_output
from tests.support.naive_pool import EventMirror, NaivePool
from worker.core.batch import FinishReason, SequenceUpdate, StepPlan
from worker.core.block_pool import BlockPool
from worker.core.scheduler import KvCacheMode, Refusal, Scheduler, SchedulerConfig
from worker.core.sequence import Sequence, StopRule
from worker.protocol.block_hash import ExtraKey, HashScheme

VOCABULARY = 4
STOP_TOKEN = 3


def scheme(block_size: int) -> HashScheme:
    return HashScheme(block_size, b"seed", "model", "weights", "tokenizer", "template", "float32", "strict")


class SchedulerPair:
    def __init__(self, config: SchedulerConfig, *, num_blocks: int, block_size: int,
                 pool_class: type[BlockPool] = BlockPool) -> None:
        caching = config.kv_cache is KvCacheMode.FULL
        self.real = Scheduler(pool_class(num_blocks, block_size, scheme(block_size), caching=caching), config)
        self.naive = Scheduler(NaivePool(num_blocks, block_size, scheme(block_size), caching=caching), config)
        self.runner = FakeRunner(block_size, VOCABULARY)
        self.mirror = EventMirror(block_size)
        self.live: dict[int, Sequence] = {}
        self.seen: Counter[str] = Counter()
        self.within_a_step = False
        self._tokens: dict[int, list[int]] = {}
        self._num_submitted = 0

    def submit(self, prompt: Tokens[int], rule: StopRule, *, extra_keys: Tokens[ExtraKey] = (),
               priority: int = 0) -> Refusal | None:
        seq_id = self._num_submitted
        self._num_submitted += 1
        ours, theirs = (Sequence(seq_id, prompt, rule, extra_keys=extra_keys, priority=priority) for _ in range(2))
        refusal = self.real.submit(ours)
        assert refusal == self.naive.submit(theirs)
        if refusal is None:
            self.live[seq_id] = ours
            self._tokens[seq_id] = list(prompt)
        self.seen["refused"] += refusal is not None
        return refusal

    def abort(self, seq_id: int) -> SequenceUpdate | None:
        update = self.real.abort(seq_id)
        assert update == self.naive.abort(seq_id)
        if update is not None:
            self._take(update)
        return update

    def step(self, *, aborting: Tokens[int] = (), num_failing: int = 0, too_large: bool = False) -> StepPlan | None:
        """Schedule, compute, abort `aborting` meanwhile, commit.

        The first `num_failing` shares fail half-way. With `too_large` the whole step does, for want of memory.
        """
        self.within_a_step = True
        plan = self._step(aborting, num_failing, too_large)
        self.within_a_step = False
        return plan

    def _step(self, aborting: Tokens[int], num_failing: int, too_large: bool) -> StepPlan | None:
        plan = self.real.schedule()
        if plan is None:
            assert self.real.idle(), "sequences are left, but nothing is planned"
            assert self.naive.schedule() is None
            return None
        self._check_shares(plan)
        truth = {share.seq_id: prefix_digests(self._tokens[share.seq_id], self.live[share.seq_id].extra_keys)
                 for share in plan.sequences}
        computed = replace(plan, sequences=plan.sequences[num_failing:])
        result = None if too_large else self.runner.execute(computed, truth)
        assert plan == self.naive.schedule()
        for seq_id in aborting:
            self.abort(seq_id)
        if result is None:
            self.runner.break_down(plan)
            updates = self.real.shrink_step(plan)
            assert updates == self.naive.shrink_step(plan)
            assert all(update.finish_reason is FinishReason.ABORT for update in updates)
        else:
            failing = replace(plan, sequences=plan.sequences[:num_failing])
            self.runner.break_down(failing)
            result = replace(result, failed=frozenset(share.seq_id for share in failing.sequences))
            updates = self.real.commit(result)
            assert updates == self.naive.commit(result)
        for update in updates:
            self._take(update)
        assert self.real.waiting_prefill_tokens == self.naive.waiting_prefill_tokens
        self.seen.update(preemptions=len(plan.preemptions), evictions=plan.num_blocks_evicted, steps=1,
                         shrunk=int(too_large), claimed=int(self.real.num_claimed_blocks > 0))
        return plan

    def read_events(self) -> None:
        self.mirror.apply(self.real.take_events())
        self.mirror.check_against(self.naive.pool)

    def check(self) -> None:
        self.real.check_invariants()
        self.naive.check_invariants()
        ours, theirs = self.real.pool, self.naive.pool
        assert ours.free_order() == theirs.free_order()
        assert (ours.num_free, ours.num_idle, ours.num_referenced, ours.num_sealed) == (
            theirs.num_free, theirs.num_idle, theirs.num_referenced, theirs.num_sealed)
        assert ours.num_free + ours.num_idle + ours.num_referenced == ours.num_blocks
        assert self.real.counters == self.naive.counters
        limit = self.real.config.max_preemptions
        assert all(sequence.num_preemptions <= limit for sequence in self.live.values())

    def drain(self, max_steps: int = 5000) -> None:
        """Whatever happened, everybody gets to the end and the pool gets all its blocks back."""
        for _ in range(max_steps):
            if self.step() is None:
                break
            self.check()
        assert not self.live, "somebody never came to an end"
        assert self.real.pool.num_referenced == 0
        self.read_events()
        self.seen["hits"] += self.real.counters.hit_tokens

    def _check_shares(self, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(len(share.token_ids) for share in plan.sequences)
        assert 0 < plan.num_tokens <= self.real.config.max_batch_tokens
        assert len(plan.sequences) <= self.real.num_running <= self.real.config.max_running
        for share in plan.sequences:
            end = share.start + len(share.token_ids)
            assert list(share.token_ids) == self._tokens[share.seq_id][share.start:end]
            assert share.samples == (end == len(self._tokens[share.seq_id]))

    def _take(self, update: SequenceUpdate) -> None:
        sequence, tokens = self.live[update.seq_id], self._tokens[update.seq_id]
        tokens += update.token_ids
        assert tokens == sequence.token_ids
        if update.cached_tokens is not None:
            assert len(tokens) == sequence.num_prompt_tokens + 1, "cached_tokens comes with the first token"
            assert 0 <= update.cached_tokens <= sequence.num_prompt_tokens - 1
        if update.finish_reason is not None:
            self._check_output(sequence, update.finish_reason)
            self.seen[str(update.finish_reason)] += 1
            del self.live[update.seq_id]

    def _check_output(self, sequence: Sequence, reason: FinishReason) -> None:
        """The output is what the model says without any cache, and it ends where the rule says."""
        output, rule = sequence.output_token_ids, sequence.stop_rule
        assert output == reference_output(sequence.prompt_token_ids, sequence.extra_keys, len(output), VOCABULARY)
        stops = [token_id in rule.ending_token_ids and index >= rule.min_tokens
                 for index, token_id in enumerate(output)]
        assert not any(stops[:-1])
        assert len(output) <= rule.max_new_tokens
        if reason is FinishReason.STOP:
            assert stops[-1]
        elif reason is FinishReason.LENGTH:
            assert len(output) == rule.max_new_tokens
            assert not stops[-1]
