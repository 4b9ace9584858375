"""Python's garbage collector in processes that hold a lot for as long as they live.

Owns how it is set. A full collection looks at every object there is, 0.2 s for what torch alone makes, and everybody
waits meanwhile.
"""

from __future__ import annotations

import gc

SELDOM = (10_000, 20, 50)


def spare_what_lives() -> None:
    """What is alive now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """As spare_what_lives(), and look less often than in a script; for event loops, whose objects soon end."""
    spare_what_lives()
    gc.set_threshold(*SELDOM)
