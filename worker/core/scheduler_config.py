"""The scheduler's settings, its counters, and the value it answers to a sequence it does not take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KvCacheMode(StrEnum):
    """"full" shares prefixes. "decode" keeps K/V for the running sequence only; "off" computes the whole sequence
    again for every token: both exist for measuring and as oracles."""

    FULL = "full"
    DECODE = "decode"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`max_batch_tokens` positions are computed per step at most; no more than that many sequences run at once.

    `watermark` is the share of the pool that an admission leaves available for the running ones' growth.
    `max_context` None, or more than the pool holds for one sequence, means what the pool holds.
    After `max_preemptions` a sequence comes back only with all blocks it can ever need, and is never preempted again.
    """

    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 512
    watermark: float = 0.01
    kv_cache: KvCacheMode = KvCacheMode.FULL
    max_context: int | None = None
    max_preemptions: int = 4

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


@dataclass(slots=True)
class SchedulerCounters:
    """Since start; none of them ever falls.

    A prompt's tokens count as queried once, at its first admission, and `hit_tokens` of them were found cached.
    `recomputed_preempted_tokens` are positions computed again because of a preemption. `computed_positions` counts
    every position of every committed step.
    """

    steps: int = 0
    failed_steps: int = 0
    computed_positions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    recomputed_preempted_tokens: int = 0
