"""Ten thousand random steps over pool and scheduler, against a naive pool and a K/V array that cannot be fooled.

The machine runs the real scheduler on the real pool and, in step, on tests/support/naive_pool.py. A fake runner
(tests/support/fake_runner.py) proves that every position reads the K/V of its own prefix. Deliberately broken pools
show that the harness bites.

The examples are the same in every run; HEADSTART_FUZZ=1 draws fresh ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.fake_runner import WrongContent
from tests.support.scheduler_pair import STOP_TOKEN, SchedulerPair
from worker.core import block_content
from worker.core.block_content import BlockContent
from worker.core.block_pool import BlockPool, _Seal
from worker.core.prefill_pace import PrefillPace
from worker.core.scheduler import Batching, KvCacheMode, SchedulerConfig
from worker.core.sequence import StopRule
from worker.protocol.block_hash import ChainHasher, ExtraKey, ExtraKeyKind

FRESH = bool(os.environ.get("HEADSTART_FUZZ"))

prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.sampled_from([[0] * 4, [0] * 8, [0, 1] * 4, [0, 1] * 5, [1] * 9, [0, 0, 0, 0, 1, 1, 1, 1]]),
)
salts = st.sampled_from([(), (), (), (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"a"),),
                         (ExtraKey(ExtraKeyKind.BODY_SALT, b"a"),), (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"a", 4),)])
rules = st.builds(
    StopRule,
    max_new_tokens=st.sampled_from([8, 8, 14, 3, 1]),
    stop_token_ids=st.sampled_from([frozenset()] * 3 + [frozenset({STOP_TOKEN})]),
    eos_token_ids=st.just(frozenset({2})),
    ignore_eos=st.sampled_from([True, True, True, False]),
    min_tokens=st.integers(0, 3),
)
configs = st.builds(
    SchedulerConfig,
    max_batch_tokens=st.sampled_from([16, 16, 7, 2, 1]),
    max_running=st.sampled_from([6, 6, 3, 1]),
    max_waiting=st.sampled_from([8, 2]),
    watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
    max_preemptions=st.sampled_from([0, 1, 2, 9]),
    max_context=st.sampled_from([None] * 5 + [10]),
    kv_cache=st.sampled_from([KvCacheMode.FULL] * 8 + [KvCacheMode.DECODE, KvCacheMode.OFF]),
    batching=st.sampled_from([Batching.CONTINUOUS] * 5 + [Batching.STATIC]),
    pace=st.sampled_from([None, None, PrefillPace(1.0, 0.3, 0.01), PrefillPace(5.0, 0.2)]),
)


class PoolSchedulerMachine(RuleBasedStateMachine):
    """Rules are what the engine may do between and within steps; `seen` counts what came of it."""

    pool_class: type[BlockPool] = BlockPool
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(config=configs, num_blocks=st.integers(7, 16), block_size=st.sampled_from([2, 3, 1, 4]))
    def start(self, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
        self.pair = SchedulerPair(config, num_blocks=num_blocks, block_size=block_size, pool_class=self.pool_class)

    @rule(batch=st.one_of(st.lists(prompts, min_size=1, max_size=4), prompts.map(lambda prompt: [prompt] * 4)),
          stop=rules, extra_keys=salts, priority=st.sampled_from([0, 0, 0, 1, -1]))
    def submit(self, batch: list[list[int]], stop: StopRule, extra_keys: tuple[ExtraKey, ...], priority: int) -> None:
        for prompt in batch:
            self.pair.submit(prompt, stop, extra_keys=extra_keys, priority=priority)

    @rule(num_steps=st.integers(1, 3))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.pair.step()
            self.pair.check()

    @rule()
    def step_on(self) -> None:
        self.step(12)

    @precondition(lambda self: self.pair.live)
    @rule(data=st.data(), num_failing=st.sampled_from([0, 0, 0, 1, 9]))
    def abort_within_a_step(self, data: st.DataObject, num_failing: int) -> None:
        aborting = data.draw(st.lists(st.sampled_from(sorted(self.pair.live)), max_size=2, unique=True))
        self.pair.step(aborting=aborting, num_failing=num_failing)

    @precondition(lambda self: self.pair.live)
    @rule(data=st.data())
    def run_out_of_memory(self, data: st.DataObject) -> None:
        aborting = data.draw(st.lists(st.sampled_from(sorted(self.pair.live)), max_size=1))
        self.pair.step(aborting=aborting, too_large=True)

    @precondition(lambda self: self.pair.live)
    @rule(data=st.data())
    def abort_between_steps(self, data: st.DataObject) -> None:
        self.pair.abort(data.draw(st.sampled_from(sorted(self.pair.live))))

    @rule(resets=st.sampled_from([False, False, False, True]))
    def read_events(self, resets: bool) -> None:
        if resets:
            self.pair.real.reset_cache()
            self.pair.naive.reset_cache()
        self.pair.read_events()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pair"):
            self.seen["rules"] += 1
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair") and not self.pair.within_a_step:  # or a failure there would be hidden by another
            self.pair.drain()
            self.seen.update(self.pair.seen)


def run(pool_class: type[BlockPool], *, max_examples: int, shrinks: bool = True) -> Counter[str]:
    """Run the machine on a pool class; what was seen on the way."""
    machine = type("Machine", (PoolSchedulerMachine,), {"pool_class": pool_class, "seen": Counter()})
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    run_state_machine_as_test(machine, settings=settings(
        max_examples=max_examples, stateful_step_count=50, deadline=None, derandomize=not FRESH, database=None,
        phases=phases, print_blob=False, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))
    return machine.seen


class ConstantHasher(ChainHasher):
    """Every block of every chain has the same hash."""

    def append(self, token_ids: Sequence[int]) -> list[int]:
        filled = super().append(token_ids)
        self.hashes[-len(filled):] = [7] * len(filled)
        return [7] * len(filled)


@pytest.fixture
def constant_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_content, "ChainHasher", ConstantHasher)


def test_ten_thousand_steps() -> None:
    seen = run(BlockPool, max_examples=460)
    while FRESH and seen["steps"] < 10_000:
        seen += run(BlockPool, max_examples=50)
    assert seen["steps"] >= 10_000
    for what in ("hits", "evictions", "preemptions", "refused", "stop", "length", "abort", "error", "shrunk",
                 "claimed"):
        assert seen[what] > 20, f"the machine hardly ever sees {what}: {seen}"


@pytest.mark.usefixtures("constant_hash")
def test_a_constant_block_hash_serves_no_wrong_block() -> None:
    seen = run(BlockPool, max_examples=100)
    assert seen["hits"] > 20
    assert seen["evictions"] > 20


class ForgetsADecrement(BlockPool):
    """The last block of a table longer than one keeps its reference."""

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids[:-1] if len(block_ids) > 1 else block_ids)


class TrustsTheHash(BlockPool):
    def _find(self, content: BlockContent, parent: _Seal | None) -> _Seal | None:
        return next(iter(self._by_hash.get(content.block_hash, ())), None)


class ForgetsTheParent(BlockPool):
    """Tokens and extra keys alone: two prefixes may share a last block's hash and tokens."""

    def _find(self, content: BlockContent, parent: _Seal | None) -> _Seal | None:
        return next((seal for seal in self._by_hash.get(content.block_hash, ()) if seal.content == content), None)


class ReleasesHeadFirst(BlockPool):
    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids[::-1])


class LooksUpWithoutPinning(BlockPool):
    """A look-up that hands blocks out while they may still be evicted."""

    def _hold(self, block_id: int) -> None:
        self._ref_counts[block_id] += 1


class KeepsTheMapEntry(BlockPool):
    """An evicted block still answers for its old prefix."""

    def _unseal(self, block_id: int) -> _Seal:
        seal = self._seals[block_id]
        assert seal is not None
        self._seals[block_id] = None
        self._num_sealed -= 1
        return seal


@pytest.mark.usefixtures("constant_hash")
@pytest.mark.parametrize("pool_class", [ForgetsADecrement, TrustsTheHash, ForgetsTheParent, ReleasesHeadFirst,
                                        LooksUpWithoutPinning, KeepsTheMapEntry])
def test_a_broken_pool_fails_the_machine(pool_class: type[BlockPool]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run(pool_class, max_examples=60, shrinks=False)


@pytest.mark.usefixtures("constant_hash")
@pytest.mark.parametrize("pool_class", [TrustsTheHash, ForgetsTheParent])
def test_the_kv_array_catches_a_wrong_block_by_itself(pool_class: type[BlockPool]) -> None:
    pair = SchedulerPair(SchedulerConfig(), num_blocks=14, block_size=2, pool_class=pool_class)
    with pytest.raises(WrongContent):
        _run_one_by_one(pair, [[0, 0, 1, 1, 0], [2, 2, 0], [2, 2, 1, 1, 0]])


def _run_one_by_one(pair: SchedulerPair, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        pair.submit(prompt, StopRule(1))
        while pair.step() is not None:
            pass
