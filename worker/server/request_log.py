"""What the worker writes about its work: one line per finished request, preemption and burst of evictions.

Never prompt or output text, never token ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from worker.engine.messages import PreemptionNote, SequenceStats
from worker.protocol.logs import get_logger
from worker.server.generation import Generation

_log = get_logger("worker.server.request_log")


def log_finished(generation: Generation) -> None:
    """The account of a request whose last choice the engine has released (or that the engine took down with it).

    Token counts are sums over its sequences: n choices of one prompt are n sequences, each with its own hit. The
    phases are those of its slowest first token.
    """
    stats = generation.stats
    prompt, cached = sum(item.prompt_tokens for item in stats), sum(item.cached_tokens for item in stats)
    slowest = max(stats, key=lambda item: sum(item.phases.values()), default=None)
    reasons = generation.finish_reasons
    _log.info(
        "request_finished",
        request_id=generation.request_id,
        route=generation.route,
        model=generation.model,
        choices=len(reasons),
        prompt_tokens=prompt,
        cached_tokens=cached,
        computed_tokens=sum(item.computed_tokens for item in stats),
        recomputed_tokens=sum(item.recomputed_tokens for item in stats),
        hit_ratio=round(cached / prompt, 4) if prompt else 0.0,
        output_tokens=generation.account().completion_tokens,
        ttft_ms={"tokenize": _ms(generation.tokenize_s), **_phases_ms(slowest)},
        inter_token_ms={"p50": _worst_ms(item.inter_token_p50_s for item in stats),
                        "max": _worst_ms(item.inter_token_max_s for item in stats)},
        preemptions=sum(item.preemptions for item in stats),
        finish_reason=reasons[0] if len(set(reasons)) == 1 else reasons,
        client_left=generation.abandoned,
        duration_ms=_ms(time.monotonic() - generation.arrived_at),
    )


def log_preemption(note: PreemptionNote) -> None:
    """A running sequence gave its blocks to another; it will be computed again from what stays cached."""
    _log.warning("preemption", request_id=note.request_id, for_request_id=note.for_request_id,
                 blocks=note.num_blocks, recompute_tokens=note.recompute_tokens)


def log_evictions(for_request_id: str | None, num_blocks: int, block_size: int) -> None:
    """Idle cached blocks were given up: who needed room, how many went, what their reuse would cost again."""
    _log.info("evictions", for_request_id=for_request_id, blocks=num_blocks, recompute_tokens=num_blocks * block_size)


def _phases_ms(stats: SequenceStats | None) -> dict[str, float]:
    return {} if stats is None else {name: _ms(seconds) for name, seconds in stats.phases.items()}


def _worst_ms(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _ms(max(known)) if known else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
