"""What the scheduler hands the runner for one step, and what comes back. Pure values.

There is no prefill or decode phase: a step moves each sequence's num_computed_tokens towards its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute positions [start, start + len(token_ids)).

    `block_table` covers every position up to the end of the share. Positions below `write_from` lie in sealed blocks:
    their keys and values exist already and must not be written again (a full hit recomputes its last position only to
    get logits). `samples` asks for a token from the last position's logits. `adapter` is the content digest of the
    LoRA adapter that computes it, None for the base model. `targets` are the prompt tokens that follow the first
    positions of the share, to be scored by those positions' logits. `pools`: its hidden states are to be summed up.
    """

    seq_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    write_from: int
    samples: bool
    adapter: bytes | None = None
    targets: Sequence[int] = ()
    pools: bool = False


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence that gave its blocks up; it will be computed again from what stays cached.

    `num_blocks_freed` are the blocks nobody else held; `num_tokens_lost` the positions it had computed, of which its
    re-admission may find the sealed ones again.
    """

    seq_id: int
    for_seq_id: int
    num_blocks_freed: int
    num_tokens_lost: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to compute, and what had to give way for it. `num_tokens` is the sum of the shares.

    `num_blocks_evicted` cached blocks were forgotten to make room; `evicted_for_seq_id` needed the most of it (None
    when nothing was evicted).
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    preemptions: tuple[Preemption, ...] = ()
    num_tokens: int = 0
    num_blocks_evicted: int = 0
    evicted_for_seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log-probability and the top alternatives, (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ScoredToken(NamedTuple):
    """What the model thought of a token that was given: its log-probability, its rank (1: the likeliest), and the top
    alternatives, (token id, logprob), best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner found: one SampledToken for each share with `samples`, by sequence id.

    `failed` could not be computed, each through a fault of its own: they have no token, and their K/V no worth.
    """

    step_id: int
    sampled: dict[int, SampledToken] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the words of the engine's messages."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one sequence gained: its new tokens, and why it ended (None while it runs).

    `cached_tokens` is set with its first token and None afterwards; `logprobs` is parallel to `token_ids`, or None
    when the runner reported none. A stop token is the last of `token_ids`.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
