"""How long a worker's slowness is believed: while nothing confirms it, it fades to what is usual among its peers.

Owns what each endpoint reported last and when that was confirmed: it had work, or a rate of it moved. It must never
read a clock.

A worker measures its rates by what it computes. One that was slow for a while (a noisy neighbour, a cold start) is
passed over, computes nothing, and would be taken for slow for ever. So what it reported counts for less and less,
until it is tried again as any other. Where it is slow indeed that costs a bounded number of slow first tokens: from
the moment a request goes there its own report counts again, and each time that one finds it as slow as before, it
takes twice as long until age sends another, up to HALF_LIFE_MAX_S. Where nobody else is busy, a request goes to a
worker that is four times slower when it has come to look as fast as the others: after two minutes, four, eight, and
then every quarter of an hour. One that has recovered waits about as long as it was slow, or less.

Only slowness fades, and never past what is usual: the median of those that serve the same model; of an even number
the faster one in the middle, of two the faster.

Known approximations: work of any kind confirms both rates; what is usual is up to USUAL_FOR_S old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FADES_AFTER_S = 10.0
HALF_LIFE_S = 15.0       # of the distance to the usual rate, as the logarithm of their ratio
HALF_LIFE_MAX_S = 120.0
SLOW_RATIO = 1.5         # to the usual rate; workers that are alike differ by less
USUAL_FOR_S = 1.0


class ReportedRates(NamedTuple):
    """0.0 where a worker does not say."""

    prefill_tokens_per_s: float
    decode_step_s: float


class _Known(NamedTuple):
    model: str
    reported: ReportedRates
    confirmed_at: float
    half_life_s: float = HALF_LIFE_S
    is_on_trial: bool = False   # a request went there on account of age, and no rate has moved since


class FadingRates:
    """By endpoint; `forget` when one goes. Instants are of any one monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._usual: dict[str, tuple[ReportedRates, float]] = {}   # by model, and when it was found

    def saw(self, endpoint_id: str, model: str, reported: ReportedRates, *, has_work: bool, now: float) -> None:
        """A report; `has_work`: requests are there, whoever sent them."""
        known = self._known.get(endpoint_id)
        if known is None or known.model != model:
            self._known[endpoint_id] = _Known(model, reported, now)
        elif known.reported != reported:
            self._known[endpoint_id] = _Known(model, reported, now, self._half_life_s(known, reported, now))
        elif has_work:
            self._known[endpoint_id] = known._replace(confirmed_at=now)

    def _half_life_s(self, known: _Known, reported: ReportedRates, now: float) -> float:
        """After its rates have moved to `reported`."""
        usual = self._usual_among(known.model, now)
        found = slowness(reported, usual)
        if found <= SLOW_RATIO:
            return HALF_LIFE_S
        was_tried = known.is_on_trial or now - known.confirmed_at > FADES_AFTER_S
        if not was_tried or found * found <= slowness(known.reported, usual):
            return known.half_life_s   # work that came anyway, or it is recovering
        return _doubled(known.half_life_s)

    def tried(self, endpoint_id: str, now: float) -> None:
        """A request goes there though its report has faded: that counts in full until it has aged anew."""
        known = self._known.get(endpoint_id)
        if known is not None:
            # Without news of the last one.
            half_life_s = _doubled(known.half_life_s) if known.is_on_trial else known.half_life_s
            self._known[endpoint_id] = known._replace(confirmed_at=now, half_life_s=half_life_s, is_on_trial=True)

    def faded(self, endpoint_id: str, now: float) -> ReportedRates | None:
        """What to reckon with in place of its report; None where that stands."""
        known = self._known.get(endpoint_id)
        if known is None or now - known.confirmed_at <= FADES_AFTER_S:
            return None
        rates = faded_to(self._usual_among(known.model, now), known.reported,
                         kept=2.0 ** ((FADES_AFTER_S - now + known.confirmed_at) / known.half_life_s))
        return None if rates == known.reported else rates

    def forget(self, endpoint_id: str) -> None:
        """It is gone, or another process answers there."""
        self._known.pop(endpoint_id, None)

    def _usual_among(self, model: str, now: float) -> ReportedRates:
        usual, found_at = self._usual.get(model, (None, now))
        if usual is None or now - found_at > USUAL_FOR_S:
            self._usual = {name: found for name, found in self._usual.items() if now - found[1] <= USUAL_FOR_S}
            usual = usual_rates(known.reported for known in self._known.values() if known.model == model)
            self._usual[model] = usual, now
        return usual


def _doubled(half_life_s: float) -> float:
    return min(2 * half_life_s, HALF_LIFE_MAX_S)


def usual_rates(reported: Iterable[ReportedRates]) -> ReportedRates:
    """What is usual among endpoints; 0.0 where none of them says."""
    rates = list(reported)
    prefills = sorted(rate for rate, _ in rates if rate > 0)
    steps = sorted(step_s for _, step_s in rates if step_s > 0)
    return ReportedRates(prefills[len(prefills) // 2] if prefills else 0.0,
                         steps[(len(steps) - 1) // 2] if steps else 0.0)


def slowness(reported: ReportedRates, usual: ReportedRates) -> float:
    """How many times slower than usual, in the rate that is worse; at most 1 where it is not."""
    prefill = usual.prefill_tokens_per_s / reported.prefill_tokens_per_s if reported.prefill_tokens_per_s > 0 else 0.0
    step = reported.decode_step_s / usual.decode_step_s if usual.decode_step_s > 0 else 0.0
    return max(prefill, step)


def faded_to(usual: ReportedRates, reported: ReportedRates, *, kept: float) -> ReportedRates:
    """What is left of a report whose distance to the usual rates counts for the share `kept`, from 1 down to 0."""
    rate, step_s = reported
    if 0 < rate < usual.prefill_tokens_per_s:
        rate = min(usual.prefill_tokens_per_s * (rate / usual.prefill_tokens_per_s) ** kept,
                   usual.prefill_tokens_per_s)
    if 0 < usual.decode_step_s < step_s:
        step_s = max(usual.decode_step_s * (step_s / usual.decode_step_s) ** kept, usual.decode_step_s)
    return ReportedRates(rate, step_s)
