"""Paired comparison: ours against each baseline, seed by seed, with a confidence interval.

Owns the arithmetic. Both policies see the same requests at the same instants, so the ratio of one seed is free of
what seeds differ in; the interval is Student's t on the logarithms of the ratios, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OURS = "headstart"
JUDGED = ("ttft_p50_s", "ttft_p99_s", "ttft_mean_s")
WITHIN_RATIO = 1.02
LEAST_S = 1e-6   # below it a time is a tie
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal one.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Ratio(NamedTuple):
    """Ours over theirs: the geometric mean over seeds, and its interval (None with a single seed)."""

    mean: float
    low: float | None
    high: float | None


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of the same seeds in the same order."""
    logs = [math.log(max(own, LEAST_S) / max(other, LEAST_S)) for own, other in zip(ours, theirs, strict=True)]
    count, mean = len(logs), sum(logs) / len(logs)
    if count < 2:
        return Ratio(math.exp(mean), None, None)
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / (count - 1))
    half = (_T95[count - 2] if count - 2 < len(_T95) else 1.96) * deviation / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def verdicts_of(by_seed: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """verdict() on each of JUDGED; none without ours or without a baseline, or where a policy answered nobody."""
    is_judged = len(by_seed[0]) > 1 and OURS in by_seed[0] and all(
        result[key] is not None for results in by_seed for result in results.values() for key in JUDGED)
    return {key: verdict(by_seed, key) for key in JUDGED} if is_judged else {}


def verdict(by_seed: Sequence[Mapping[str, Mapping[str, Any]]], key: str) -> dict[str, Any]:
    """How ours stands in `key` (less is better) against the best baseline, by the mean over seeds of each.

    `by_seed`: policy to result, for each seed. `outcome` is wins, within (2 %) or loses; `sure` when the interval
    lies on one side of 1.
    """
    names = [name for name in by_seed[0] if name != OURS]
    ours = [float(results[OURS][key]) for results in by_seed]
    ratios = {name: paired_ratio(ours, [float(results[name][key]) for results in by_seed]) for name in names}
    rival = max(ratios, key=lambda name: ratios[name].mean)
    ratio = ratios[rival]
    outcome = "wins" if ratio.mean < 1 else "within" if ratio.mean <= WITHIN_RATIO else "loses"
    sure = ratio.low is not None and ratio.high is not None and (ratio.high < 1 or ratio.low > 1)
    return {"outcome": outcome, "rival": rival, "ratio": ratio.mean, "low": ratio.low, "high": ratio.high,
            "sure": sure, "against": {name: ratio.mean for name, ratio in ratios.items()}}
