"""Where a sequence's time goes, and how fast the engine is. Arithmetic on instants passed in; reads no clock.

All instants are seconds of one monotonic clock. Known approximation: a step is shared by its whole batch, so a
sequence's prefill time is the time of the steps it took part in, not its own share of their work.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

PHASES = ("queue", "allocate", "prefill", "recompute", "sample")
PREFILL_SAMPLE_TOKENS_MIN = 32      # smaller prefill shares measure overhead, not speed
RATE_DECAY = 0.9                    # weight of the past at every new observation: about the last ten count
FIXED_ROWS = 8                      # what a decode step takes whatever its batch, in rows
PAUSE_S = 10.0                      # without prefill; from then on, what was measured before it ages
AGE_HALF_LIFE_S = 10.0
AGED_TOKENS_MIN = 256               # what is left of it at least: a short prompt measures overhead, too


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one step: scheduling, the forward pass, sampling; and the instant its tokens were there."""

    allocate_s: float
    forward_s: float
    sample_s: float
    ended_at: float

    @property
    def total_s(self) -> float:
        return self.allocate_s + self.forward_s + self.sample_s


@dataclass(slots=True)
class SequenceTimings:
    """One sequence's clock: TTFT by phase, then the gaps between its tokens.

    The phases add up to the TTFT exactly: `queue` is all the time in which no step worked on the sequence.
    """

    arrived_at: float
    _worked: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES[1:], 0.0))
    _first_token_at: float | None = None
    _last_token_at: float = 0.0
    _gaps: list[float] = field(default_factory=list)

    def worked(self, timing: StepTiming, *, recompute: bool) -> None:
        """A step computed positions of this sequence; `recompute`: for the second time, after a preemption."""
        if self._first_token_at is None:
            self._worked["allocate"] += timing.allocate_s
            self._worked["recompute" if recompute else "prefill"] += timing.forward_s
            self._worked["sample"] += timing.sample_s

    def token(self, at: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = at
        else:
            self._gaps.append(at - self._last_token_at)
        self._last_token_at = at

    def phases(self) -> dict[str, float]:
        """Seconds by phase up to the first token; empty when there was none."""
        if self._first_token_at is None:
            return {}
        queue_s = self._first_token_at - self.arrived_at - sum(self._worked.values())
        return {"queue": max(0.0, queue_s), **self._worked}

    def inter_token_p50_s(self) -> float | None:
        return statistics.median(self._gaps) if self._gaps else None

    def inter_token_max_s(self) -> float | None:
        return max(self._gaps, default=None)


class BandwidthMeter:
    """How much of the device's memory bandwidth decoding uses: bytes a step must read / its time / the peak.

    Known approximation: every weight once a step, and K/V of every position in context, a shared prefix for each of
    its sequences; so the ratio can be too high where prefixes are shared, and is cut at 1.
    """

    def __init__(self, peak_bytes_per_s: float) -> None:
        self._peak_bytes_per_s = peak_bytes_per_s
        self.ratio = 0.0

    def observe(self, *, num_bytes: int, step_s: float) -> None:
        if step_s > 0 and self._peak_bytes_per_s > 0:
            found = min(1.0, num_bytes / step_s / self._peak_bytes_per_s)
            self.ratio = found if self.ratio == 0.0 else RATE_DECAY * self.ratio + (1 - RATE_DECAY) * found


class EngineRates:
    """Running estimates that routing needs: prefill tokens per second and seconds of a decode step.

    Steps that only decode measure the second; steps with a real share of prefill measure the first, the time of the
    decode rows in them taken off: as long as rows alone took lately, longer where they are more now, as if FIXED_ROWS
    came on top of any number. Observations decay, so a change of load shows within about ten steps. After a pause the
    first prompt counts for most: whoever was slow before it, and was spared work therefore, may have only one to show
    that it no longer is. Decode steps come in numbers, so theirs needs no such thing.
    """

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._prefill_at: float | None = None
        self._decode_step_s: float | None = None
        self._decode_rows = 0.0

    def observe(self, *, prefill_tokens: int, decode_rows: int, step_s: float, at: float | None = None) -> None:
        """A step of `step_s` seconds that ended `at`; None, as for a warm-up: no pause is known before or after."""
        if prefill_tokens == 0 and decode_rows > 0:
            past = step_s if self._decode_step_s is None else self._decode_step_s
            self._decode_step_s = RATE_DECAY * past + (1 - RATE_DECAY) * step_s
            self._decode_rows = RATE_DECAY * (self._decode_rows or decode_rows) + (1 - RATE_DECAY) * decode_rows
        elif prefill_tokens >= PREFILL_SAMPLE_TOKENS_MIN:
            growth = (decode_rows + FIXED_ROWS) / (self._decode_rows + FIXED_ROWS)
            decode_s = self.decode_step_s * max(1.0, growth) if decode_rows else 0.0
            own_s = max(step_s - decode_s, step_s * prefill_tokens / (prefill_tokens + decode_rows) / 4)
            kept = RATE_DECAY * self._kept_after_pause(at)
            self._prefill_tokens = kept * self._prefill_tokens + prefill_tokens
            self._prefill_s = kept * self._prefill_s + own_s
            self._prefill_at = at

    def _kept_after_pause(self, at: float | None) -> float:
        """What part of the past still counts."""
        pause_s = 0.0 if at is None or self._prefill_at is None else at - self._prefill_at - PAUSE_S
        if pause_s <= 0:
            return 1.0
        least = AGED_TOKENS_MIN / self._prefill_tokens if self._prefill_tokens > AGED_TOKENS_MIN else 1.0
        return float(max(least, 2.0 ** (-pause_s / AGE_HALF_LIFE_S)))

    @property
    def prefill_tokens_per_s(self) -> float:
        """0.0 until something was measured."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    @property
    def decode_step_s(self) -> float:
        """0.0 until something was measured."""
        return self._decode_step_s or 0.0
