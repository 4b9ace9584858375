"""The scheduler's settings, its counters, and the value it answers to a sequence it does not take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker.core.prefill_pace import PrefillPace
from worker.core.sequence import Sequence


class KvCacheMode(StrEnum):
    """"full" shares prefixes. "decode" keeps K/V for the running sequence only; "off" computes the whole sequence
    again for every token: both exist for measuring and as oracles."""

    FULL = "full"
    DECODE = "decode"
    OFF = "off"


class Batching(StrEnum):
    """"continuous" admits whenever there is room. "static" forms a batch when nothing runs, and lets nobody in until
    its last member has ended: for measuring what the first is worth."""

    CONTINUOUS = "continuous"
    STATIC = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`max_batch_tokens` positions are computed per step at most; no more than that many sequences run at once.

    `watermark` is the share of the pool that an admission leaves available for the running ones' growth.
    `max_context` None, or more than the pool holds for one sequence, means what the pool holds.
    After `max_preemptions` a sequence comes back only with all blocks it can ever need, and is never preempted again.
    `pace` bounds the prefill of a step in which somebody decodes; None: `max_batch_tokens` alone does.
    """

    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 512
    watermark: float = 0.01
    kv_cache: KvCacheMode = KvCacheMode.FULL
    max_context: int | None = None
    max_preemptions: int = 4
    batching: Batching = Batching.CONTINUOUS
    pace: PrefillPace | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}: one prompt token and one output need 2")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}: it is a share of the pool, at least 0 and below 1")
        if self.max_preemptions < 0:
            raise ValueError(f"max_preemptions is {self.max_preemptions}: it cannot be negative")


class RefusalReason(StrEnum):
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    EMPTY_PROMPT = "empty_prompt"
    NO_NEW_TOKENS = "no_new_tokens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence was not taken: the bound it ran into, and what it asked for."""

    reason: RefusalReason
    limit: int
    actual: int


def refusal_of(sequence: Sequence, max_context: int) -> Refusal | None:
    """Why a sequence can never run here, however long it waits; None when it can."""
    if sequence.num_prompt_tokens < 1:
        return Refusal(RefusalReason.EMPTY_PROMPT, 1, sequence.num_prompt_tokens)
    if sequence.stop_rule.max_new_tokens <= sequence.num_resumed_tokens:
        return Refusal(RefusalReason.NO_NEW_TOKENS, sequence.num_resumed_tokens + 1,
                       sequence.stop_rule.max_new_tokens)
    if sequence.num_tokens_max > max_context:
        return Refusal(RefusalReason.TOO_LONG, max_context, sequence.num_tokens_max)
    return None


@dataclass(slots=True)
class SchedulerCounters:
    """Since start; none of them ever falls.

    A prompt's tokens count as queried once, at its first admission, and `hit_tokens` of them were found cached.
    `recomputed_preempted_tokens` are positions computed again because of a preemption. `computed_positions` counts
    every position of every committed step. `shrunk_steps` did not fit into memory and were planned anew.
    """

    steps: int = 0
    failed_shares: int = 0
    shrunk_steps: int = 0
    computed_positions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    recomputed_preempted_tokens: int = 0

    def admitted(self, sequence: Sequence, *, counts: bool) -> None:
        """Once per sequence, when its blocks are in hand: 0 <= cached <= prompt - 1. `counts`: there is a cache."""
        # Resumed outputs may be cached too: they are no prompt tokens.
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
        if counts:
            self.queried_tokens += sequence.num_prompt_tokens
            self.hit_tokens += sequence.num_cached_tokens

    def adopted(self, sequence: Sequence, num_tokens: int) -> None:
        """Prompt positions found after admission are hits like the others; after a preemption they are no news."""
        assert sequence.num_cached_tokens is not None, "only an admitted sequence adopts"
        if sequence.num_preemptions or sequence.num_output_tokens > sequence.num_resumed_tokens:
            return
        num_cached = min(sequence.num_cached_tokens + num_tokens, sequence.num_prompt_tokens - 1)
        self.hit_tokens += num_cached - sequence.num_cached_tokens
        sequence.num_cached_tokens = num_cached
