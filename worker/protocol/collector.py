"""Python's garbage collector in processes that hold a lot for as long as they live.

Owns how it is set. A full collection looks at every object there is, 0.2 s for what torch alone makes, and everybody
waits meanwhile.
"""

from __future__ import annotations

import gc

# Requests of the gateway leave no cycles behind (tests/scenarios/test_no_cycles.py), but clients' mistakes and
# cancellations do, by way of aiohttp, and what is under way when the collector looks moves up a generation. So the
# oldest one is looked at for every 250,000 objects that stay, which takes 20 ms with 64 MiB of texts remembered. With
# 20 and 50 that was hardly ever, and what clients had left behind piled up.
SELDOM = (10_000, 5, 5)


def spare_what_lives() -> None:
    """What is alive now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """As spare_what_lives(), and look less often than in a script; for event loops, whose objects soon end."""
    spare_what_lives()
    gc.set_threshold(*SELDOM)
