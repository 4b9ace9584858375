"""Decides what the next step computes (interface first; the bodies are being written)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker.core.batch import SequenceUpdate, StepPlan, StepResult
from worker.core.block_pool import BlockPool
from worker.core.sequence import Sequence
from worker.protocol.cache_events import CacheEvent


class KvCacheMode(StrEnum):
    FULL = "full"
    DECODE = "decode"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`watermark` is the share of the pool an admission leaves available; `max_context` None means what the pool
    holds for one sequence (a larger value is capped to it)."""

    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 512
    watermark: float = 0.01
    kv_cache: KvCacheMode = KvCacheMode.FULL
    max_context: int | None = None
    max_preemptions: int = 4


class RefusalReason(StrEnum):
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    EMPTY_PROMPT = "empty_prompt"
    NO_NEW_TOKENS = "no_new_tokens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence was not taken. `limit` is the bound it ran into, `actual` what it asked for."""

    reason: RefusalReason
    limit: int
    actual: int


@dataclass(slots=True)
class SchedulerCounters:
    computed_positions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    recomputed_preempted_tokens: int = 0
    steps: int = 0


class Scheduler:
    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.config = config
        self.counters = SchedulerCounters()

    @property
    def max_context(self) -> int:
        """Longest prompt plus output, in tokens, that can always finish here."""
        raise AssertionError("being written")

    def submit(self, sequence: Sequence) -> Refusal | None:
        """Queue a sequence; None when it was taken. `seq_id` must be new."""
        raise AssertionError("being written")

    def abort(self, seq_id: int) -> SequenceUpdate | None:
        """End a sequence. The update when it ended at once; None when unknown, or when it is part of the step in
        flight: then its update comes from commit() or fail_step()."""
        raise AssertionError("being written")

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. One step is in flight until commit/fail_step."""
        raise AssertionError("being written")

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Take the step's outcome: seal what is complete, append tokens, finish what is done."""
        raise AssertionError("being written")

    def fail_step(self, plan: StepPlan) -> list[SequenceUpdate]:
        """The runner raised: every sequence of the plan ends with "error", nothing of the step is published."""
        raise AssertionError("being written")

    def reset_cache(self) -> None:
        """Forget every cached block that no running sequence holds."""
        raise AssertionError("being written")

    def take_events(self) -> list[CacheEvent]:
        raise AssertionError("being written")

    def idle(self) -> bool:
        raise AssertionError("being written")

    def check_invariants(self) -> None:
        raise AssertionError("being written")

    @property
    def num_running(self) -> int:
        raise AssertionError("being written")

    @property
    def num_waiting(self) -> int:
        raise AssertionError("being written")

    @property
    def waiting_prefill_tokens(self) -> int:
        raise AssertionError("being written")

    @property
    def running_prefill_tokens(self) -> int:
        raise AssertionError("being written")

    @property
    def decode_context_tokens(self) -> int:
        raise AssertionError("being written")
