"""How long a step takes at an endpoint where streams run, as first tokens tell: a prompt that waits there meets one
step after the other, and what it took beyond computing the prompts is what those steps took.

Owns what was seen of it. It must never read a clock. A worker's own figure is of steps that only decode, of which a
busy one has few, and knows nothing of others that use the same cores.

A step is taken to cost a share for each request there and as much again as FIXED_STREAMS of them, so that what was
seen with few says something about many before they are there. An endpoint of which nothing has been seen is as the
others are. An observation counts for the less, the less of the wait steps were expected to be, or where it met less
than a step of its own beyond the one under way: such waits are late for other causes. And it is taken to be off by
CHANGE_MAX at most: a stray one does little, a worker that slows down shows within a few requests.
"""

from __future__ import annotations

from gateway.routing.cost import STEP_UNDER_WAY, CandidateCost

FIXED_STREAMS = 8
NEWEST_WEIGHT = 0.4
CHANGE_MAX = 3.0
# From this share of a wait on, steps are what it tells of.
WHOLE_SHARE = 0.25


class BusySteps:
    """By endpoint; `forget` when one goes."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._share_of_all = 0.0

    def step_s(self, endpoint_id: str, num_active: int) -> float:
        """A step with so many requests there; 0.0 when nothing has been seen anywhere."""
        return self._shares.get(endpoint_id, self._share_of_all) * (num_active + FIXED_STREAMS)

    def share_of(self, endpoint_id: str) -> float | None:
        """A request's share of a step there; None where nothing has been seen yet, and `share_of_all` holds."""
        return self._shares.get(endpoint_id)

    @property
    def share_of_all(self) -> float:
        return self._share_of_all

    def saw(self, expected: CandidateCost, first_token_s: float) -> None:
        """A first token took so long, where `expected` was reckoned."""
        num_own = expected.num_steps - STEP_UNDER_WAY
        # Waiting for memory or for a slower tier says nothing about steps.
        if num_own <= 0 or expected.steps_s <= 0 or expected.room_s or expected.spared_s:
            return
        prompts_s = expected.prefill_s + expected.queue_s
        weight = NEWEST_WEIGHT * min(1.0, num_own) * min(1.0, expected.steps_s / (expected.steps_s + prompts_s)
                                                         / WHOLE_SHARE)
        num_shares = expected.num_steps * (expected.num_active + FIXED_STREAMS)
        seen = (first_token_s - prompts_s) / num_shares
        of_all = self._share_of_all or expected.steps_s / num_shares
        self._shares[expected.endpoint_id] = moved(self._shares.get(expected.endpoint_id, of_all), seen, weight)
        self._share_of_all = moved(of_all, seen, weight)

    def forget(self, endpoint_id: str) -> None:
        """Another process answers there now."""
        self._shares.pop(endpoint_id, None)


def moved(before: float, seen: float, weight: float) -> float:
    """What is believed after an observation, which is taken to be off by CHANGE_MAX at most."""
    return before + weight * (min(max(seen, before / CHANGE_MAX), before * CHANGE_MAX) - before)
