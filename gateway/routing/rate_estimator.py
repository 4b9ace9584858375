"""How fast an endpoint is, from what requests there were seen to take: prefill by length, decode steps by batch.

Owns the observations. It must never read a clock. For engines that report no rates these are the only ones; for those
that do, they step in where report and observation differ by more than TRUST_RATIO. Medians of the last few, so that a
stray one counts for nothing, forgotten after STALE_S, so that an endpoint is judged by what it is now.

Known approximations: what was queued before a request counts as if computed at its rate; a batch's context is not
told apart; buckets are powers of two.
"""

from __future__ import annotations

import statistics
from collections import deque

PREFILL_TOKENS_MIN = 256   # less measures the way there, not the speed
SAMPLES_MIN = 3
SAMPLES_KEPT = 15
STALE_S = 600.0
TRUST_RATIO = 3.0
STRETCH_MAX = 20.0
STRETCH_NEWEST_WEIGHT = 0.05
LENGTH_BUCKETS = 10        # 256 tokens to over 64 k
BATCH_BUCKETS = 8          # 1 stream to over 64

_Samples = deque[tuple[float, float]]


class RateEstimator:
    """By endpoint; `forget` when one goes. Instants are of any one monotonic clock."""

    def __init__(self) -> None:
        self._prefill: dict[tuple[str, int], _Samples] = {}
        self._steps: dict[tuple[str, int], _Samples] = {}

    def first_token(self, endpoint_id: str, tokens: int, seconds: float, *, now: float) -> None:
        """`tokens` of prefill, the queue before it included, took `seconds`."""
        if tokens >= PREFILL_TOKENS_MIN and seconds > 0:
            _add(self._prefill, (endpoint_id, length_bucket(tokens)), tokens / seconds, now)

    def inter_token(self, endpoint_id: str, num_streams: int, seconds: float, *, now: float) -> None:
        """A stream's tokens came `seconds` apart while `num_streams` ran there."""
        if num_streams > 0 and seconds > 0:
            _add(self._steps, (endpoint_id, batch_bucket(num_streams)), seconds, now)

    def prefill_tokens_per_s(self, endpoint_id: str, prompt_tokens: int, *, now: float) -> float:
        """For prompts about this long; 0.0 when too little has been seen lately."""
        return _near(self._prefill, endpoint_id, length_bucket(prompt_tokens), now)

    def decode_step_s(self, endpoint_id: str, num_streams: int, *, now: float) -> float:
        """With about so many streams; 0.0 when too little has been seen lately."""
        return _near(self._steps, endpoint_id, batch_bucket(num_streams), now)

    def forget(self, endpoint_id: str) -> None:
        """Another process answers there now."""
        for table in (self._prefill, self._steps):
            for key in [key for key in table if key[0] == endpoint_id]:
                del table[key]


class Stretch:
    """How many decode steps a stream's token takes, since prompts are computed in between: `ratio`, at least 1.

    One figure for all endpoints: a running mean.
    """

    def __init__(self) -> None:
        self.ratio = 1.0

    def saw(self, inter_token_s: float, decode_step_s: float) -> None:
        """A stream's tokens came so far apart, where a decode step alone takes so long."""
        if inter_token_s > 0 and decode_step_s > 0:
            seen = min(max(inter_token_s / decode_step_s, 1.0), STRETCH_MAX)
            self.ratio += STRETCH_NEWEST_WEIGHT * (seen - self.ratio)


def settled(reported: float, observed: float) -> float:
    """The rate to reckon with; 0.0 when neither is known."""
    if reported <= 0 or observed <= 0:
        return max(reported, observed, 0.0)
    return reported if 1 / TRUST_RATIO <= observed / reported <= TRUST_RATIO else observed


def length_bucket(tokens: int) -> int:
    """Prompts about this long."""
    return min(max(tokens // PREFILL_TOKENS_MIN, 1).bit_length() - 1, LENGTH_BUCKETS - 1)


def batch_bucket(num_streams: int) -> int:
    """Batches of about so many streams."""
    return min(max(num_streams, 1).bit_length() - 1, BATCH_BUCKETS - 1)


def _add(table: dict[tuple[str, int], _Samples], key: tuple[str, int], value: float, now: float) -> None:
    samples = table.get(key)
    if samples is None:
        samples = table[key] = deque(maxlen=SAMPLES_KEPT)
    samples.append((now, value))


def _near(table: dict[tuple[str, int], _Samples], endpoint_id: str, bucket: int, now: float) -> float:
    """The median of this bucket, or of one next to it."""
    for near in (bucket, bucket - 1, bucket + 1):
        samples = table.get((endpoint_id, near))
        if samples is None:
            continue
        while samples and now - samples[0][0] > STALE_S:
            samples.popleft()
        if len(samples) >= SAMPLES_MIN:
            return statistics.median(value for _, value in samples)
    return 0.0
