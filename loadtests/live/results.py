"""What a replay gave: the keys of `simulate --json` from what clients saw.

Owns the arithmetic over outcomes. It must never send anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadtests.live.driver import LATE_S, Outcome
from loadtests.sim.metrics import CacheBounds, mean, quantile
from loadtests.streaming_client import TimedAnswer

ERROR_KINDS_MAX = 32


def result_of(outcomes: Sequence[Outcome], bounds: CacheBounds, label: str) -> dict[str, Any]:
    """One entry of `policies`. Figures of answered requests; None where there is nothing to tell."""
    well = [outcome for outcome in outcomes if outcome.answer is not None]
    ttft = sorted(outcome.ttft_s for outcome in well if outcome.ttft_s is not None)
    gaps = sorted(gap for outcome in well for gap in outcome.gaps_s)
    whole = sorted(outcome.total_s for outcome in well)
    told = [outcome.answer for outcome in well if outcome.answer is not None and outcome.answer.tells_usage]
    prompt, cached = sum(one.prompt_tokens for one in told), sum(one.cached_tokens for one in told)
    span_s = max((outcome.due_s + outcome.total_s for outcome in outcomes), default=0.0)
    return {
        "policy": label, "ttft_mean_s": mean(ttft), "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p90_s": quantile(ttft, 0.9), "ttft_p95_s": quantile(ttft, 0.95), "ttft_p99_s": quantile(ttft, 0.99),
        "ttft_max_s": quantile(ttft, 1.0), "hit_token_ratio": cached / prompt if prompt else None,
        "ideal_hit_token_ratio": bounds.infinite_ratio, "max_mean_load": _max_mean_load(told),
        "requests": len(well), "failed": len(outcomes) - len(well), "errors": errors_of(outcomes),
        "first_of_errors": first_of_errors(outcomes),
        "prompt_tokens": prompt, "cached_tokens": cached,
        "completion_tokens": sum(one.completion_tokens for one in told), "told_usage": len(told),
        "inter_token_p50_s": quantile(gaps, 0.5), "inter_token_p99_s": quantile(gaps, 0.99),
        "inter_token_max_s": quantile(gaps, 1.0), "request_mean_s": mean(whole),
        "request_p99_s": quantile(whole, 0.99), "late": sum(outcome.late_s > LATE_S for outcome in outcomes),
        "latest_s": max((outcome.late_s for outcome in outcomes), default=0.0), "span_s": span_s,
        "prediction": prediction_of(outcomes)}


def errors_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many failed, by kind; beyond ERROR_KINDS_MAX kinds the rarest are one."""
    kinds = Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()
    kept = dict(kinds[:ERROR_KINDS_MAX])
    rest = sum(count for _, count in kinds[ERROR_KINDS_MAX:])
    return {**kept, "other": rest} if rest else kept


def first_of_errors(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """What the first failure of each kind said."""
    first: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and len(first) < ERROR_KINDS_MAX:
            first.setdefault(outcome.error, outcome.detail)
    return first


def prediction_of(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """How the gateway's prediction compares with the reported hit; None where no gateway of ours answered."""
    errors = [outcome.answer.cached_tokens - outcome.answer.matched_tokens for outcome in outcomes
              if outcome.answer is not None and outcome.answer.matched_tokens is not None
              and outcome.answer.tells_usage]
    if not errors:
        return None
    return {"compared": len(errors), "equal": sum(error == 0 for error in errors),
            "too_much": sum(error < 0 for error in errors), "too_little": sum(error > 0 for error in errors),
            "mean_absolute_tokens": mean([float(abs(error)) for error in errors])}


def num_workers_of(outcomes: Sequence[Outcome]) -> int | None:
    """Workers that answered, where the answers tell."""
    return len({outcome.answer.worker_id for outcome in outcomes
                if outcome.answer is not None and outcome.answer.worker_id is not None}) or None


def _max_mean_load(answers: Sequence[TimedAnswer]) -> float | None:
    """Positions computed by the busiest worker against the mean; None where answers tell no worker."""
    computed: Counter[str] = Counter()
    for answer in answers:
        if answer.worker_id is not None:
            computed[answer.worker_id] += answer.computed_tokens + answer.completion_tokens
    return max(computed.values()) * len(computed) / sum(computed.values()) if computed.total() else None
