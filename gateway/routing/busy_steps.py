"""How long a step takes at an endpoint where streams run, as first tokens tell: a prompt that waits there meets one
step after the other, and what it took beyond computing the prompts is what those steps took.

Owns what was seen of it. It must never read a clock. A worker's own figure is of steps that only decode, of which a
busy one has few, and knows nothing of others that use the same cores.

A step is taken to cost a share for each request there and as much again as FIXED_STREAMS of them, so that what was
seen with few says something about many before they are there. An endpoint of which nothing has been seen is as the
others are. Each observation counts NEWEST_WEIGHT, less when it met less than a step of its own beyond the one under
way (a short wait has many causes), and is taken to be off by CHANGE_MAX at most: a stray one does little, a worker
that slows down shows within a few requests.
"""

from __future__ import annotations

STEP_UNDER_WAY = 0.5   # of a step, in the mean: what every prompt meets where streams run
FIXED_STREAMS = 8
NEWEST_WEIGHT = 0.3
CHANGE_MAX = 3.0


class BusySteps:
    """By endpoint; `forget` when one goes."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._share_of_all = 0.0

    def step_s(self, endpoint_id: str, num_active: int) -> float:
        """A step with so many requests there; 0.0 when nothing has been seen anywhere."""
        return self._shares.get(endpoint_id, self._share_of_all) * (num_active + FIXED_STREAMS)

    def saw(self, endpoint_id: str, num_active: int, seconds: float, *, num_steps: float, expected_s: float) -> None:
        """A prompt met so many steps with so many requests there, and they took so many seconds, where `expected_s`
        was expected; less than nothing, when prompts were computed faster than was thought."""
        if num_steps <= STEP_UNDER_WAY or expected_s <= 0:
            return
        per_share = num_steps * (num_active + FIXED_STREAMS)
        seen, expected = seconds / per_share, expected_s / per_share
        weight = NEWEST_WEIGHT * min(1.0, num_steps - STEP_UNDER_WAY)
        of_all = self._share_of_all or expected
        self._shares[endpoint_id] = _moved(self._shares.get(endpoint_id, of_all), seen, weight)
        self._share_of_all = _moved(of_all, seen, weight)

    def forget(self, endpoint_id: str) -> None:
        """Another process answers there now."""
        self._shares.pop(endpoint_id, None)


def _moved(before: float, seen: float, weight: float) -> float:
    return before + weight * (min(max(seen, before / CHANGE_MAX), before * CHANGE_MAX) - before)
