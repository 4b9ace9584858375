"""An endpoint: what routing knows about one worker process at one instant.

Owns the snapshot type, no state. Written by the worker poll, read by the picker; it must never hold a socket or a
task. The figures are as old as the last poll: what was routed since then is in the load ledger, and cost.py takes the
larger of the two.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Knowledge(StrEnum):
    """How the prefix index learns about this endpoint's cache."""

    EXACT = "exact"              # its events, in sequence
    APPROXIMATE = "approximate"  # only what we routed there ourselves
    NONE = "none"                # nothing: routed by load


class EndpointView(Struct, frozen=True, gc=False):
    """One worker as last reported. Counts and tokens; rates are 0.0 when unknown; `blocks_total` 0: pool unknown,
    `max_context` 0: any length.

    `blocks_free` hold nothing, `blocks_cached` hold something nobody uses and may be evicted; all others are in use.
    `held_tokens_at_report` is the ledger's `held_tokens` as of the report, less what waited there for room and so was
    still free: what is held now beyond it is new.
    `others_ratio` is the share of its work that comes from elsewhere (others_share.py).
    `step_tokens` are positions of prompts that it computes in one step beside decoding; 0: as many as are usual.
    `price_s` is what an operator or a breaker adds, in seconds; cost.py bounds it.
    """

    endpoint_id: str
    epoch: str
    models: frozenset[str] = frozenset()
    ready: bool = True
    draining: bool = False
    knowledge: Knowledge = Knowledge.EXACT
    block_size: int = 16
    max_context: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    kv_usage_ratio: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    waiting_prefill_tokens: int = 0
    running_prefill_tokens: int = 0
    decode_context_tokens: int = 0
    held_tokens_at_report: int = 0
    others_ratio: float = 0.0
    step_tokens: int = 0
    price_s: float = 0.0
