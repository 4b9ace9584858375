"""How soon to look again at a worker that is out: lost, stalled, or loading.

Owns: that pace. For the first minutes a worker that comes back, as one that was stopped or is being restarted, is
looked at more often than a healthy one, so that it is used again at once; one that stays away costs less and less.
Must never: look at many workers together more often than LOOK_SHARE_S allows, or than at healthy ones.
"""

from __future__ import annotations

RETURN_LOOK_S = 0.5
RETURN_LOOKS = 120      # a minute of refused connections; several of answers that do not come
BACKOFF_MAX_S = 5.0
LOOK_SHARE_S = 0.015    # between two looks, for each worker there is: should all be out, some 70 looks a second


def look_at_lost_after_s(usual_s: float, num_failures: int, num_workers: int) -> float:
    """From the num_failures-th look in a row that found it out to the next; healthy ones are `usual_s` apart."""
    if num_failures <= RETURN_LOOKS:
        return min(usual_s, max(RETURN_LOOK_S, LOOK_SHARE_S * num_workers))
    doublings = float(min(num_failures - RETURN_LOOKS, 16))
    return max(usual_s, min(usual_s * 2 ** doublings, BACKOFF_MAX_S))
