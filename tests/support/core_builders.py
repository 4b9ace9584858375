"""Builders for stories about pool and scheduler. The fake model says one token again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from worker.core.batch import SampledToken, ScheduledSequence, SequenceUpdate, StepPlan, StepResult
from worker.core.block_content import BlockContent, ContentChain
from worker.core.block_pool import BlockPool
from worker.core.scheduler import KvCacheMode, Scheduler, SchedulerConfig
from worker.core.sequence import Sequence, StopRule
from worker.protocol.block_hash import ExtraKey, HashScheme

SAID = 9


def make_scheme(block_size: int) -> HashScheme:
    return HashScheme(block_size, b"seed", "model", "weights", "tokenizer", "template", "float32", "strict")


def make_pool(num_blocks: int, block_size: int = 16, *, caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, block_size, make_scheme(block_size), caching=caching)


def make_scheduler(num_blocks: int, block_size: int = 16, **settings: Any) -> Scheduler:
    config = SchedulerConfig(**settings)
    return Scheduler(make_pool(num_blocks, block_size, caching=config.kv_cache is KvCacheMode.FULL), config)


def make_sequence(seq_id: int, prompt: Iterable[int], max_new_tokens: int = 1, **settings: Any) -> Sequence:
    stops = {name: settings.pop(name) for name in list(settings) if name in StopRule.__dataclass_fields__}
    tenant = settings.pop("tenant", None)
    sequence = Sequence(seq_id, prompt, StopRule(max_new_tokens, **stops), **settings)
    sequence.tenant = tenant
    return sequence


def contents(token_ids: list[int], block_size: int = 16, extra_keys: tuple[ExtraKey, ...] = ()) -> list[BlockContent]:
    chain = ContentChain(make_scheme(block_size), extra_keys)
    chain.append(token_ids)
    return chain.blocks


def compute(pool: BlockPool, chain: list[BlockContent]) -> list[int]:
    """Match what is there, acquire and seal the rest: the table a sequence would hold."""
    table = pool.match(chain)
    fresh = pool.acquire(len(chain) - len(table))
    assert fresh is not None, "the story needs a larger pool"
    for block_id in fresh:
        index = len(table)
        held = pool.seal(block_id, chain[index], parent=table[-1] if table else None)
        assert held is not None
        table.append(held)
    return table


def say_same(share: ScheduledSequence) -> int:
    return SAID


def finish(scheduler: Scheduler, plan: StepPlan, say: Callable[[ScheduledSequence], int] = say_same,
           ) -> list[SequenceUpdate]:
    """Commit a plan with what the fake model says."""
    return scheduler.commit(StepResult(plan.step_id, {
        share.seq_id: SampledToken(say(share)) for share in plan.sequences if share.samples}))


def step(scheduler: Scheduler, say: Callable[[ScheduledSequence], int] = say_same) -> StepPlan:
    """One whole step, of which there must be one."""
    plan = scheduler.schedule()
    assert plan is not None
    finish(scheduler, plan, say)
    scheduler.check_invariants()
    return plan


def drive(scheduler: Scheduler, max_steps: int = 2000) -> list[StepPlan]:
    """Run to the end."""
    plans = []
    while (plan := scheduler.schedule()) is not None:
        assert len(plans) < max_steps, "this does not end"
        finish(scheduler, plan)
        scheduler.check_invariants()
        plans.append(plan)
    assert scheduler.idle()
    return plans


def shares(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """seq_id -> (start, number of positions), in the order of the plan."""
    return {share.seq_id: (share.start, len(share.token_ids)) for share in plan.sequences}
