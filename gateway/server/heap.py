"""How this process keeps its memory: when Python looks for cycles, and how many heaps malloc has.

Owns two settings of the process. Must never: collect or trim while requests are served, which would stop all of them.
"""

from __future__ import annotations

import ctypes
import gc

# Requests leave no cycles behind (tests/scenarios/test_no_cycles.py), but clients' mistakes and cancellations do, by
# way of aiohttp, and what is under way when the collector looks moves up a generation. So the oldest one is looked at
# for every 250,000 objects that stay, in some ten milliseconds. With 20 and 50 that was hardly ever, and what clients
# had left behind piled up.
GC_THRESHOLDS = (10_000, 5, 5)
# glibc gives every thread a heap of its own, and what is freed in one (a tokenizer is built in a thread) no other may
# use. Threads share one here, beside the event loop's: few are at work at a time.
HEAPS_MAX = 2
_M_ARENA_MAX = -8  # malloc.h


def spare_collections() -> None:
    """What is alive now stays: the collector need not look at it again, nor look as often as in a script."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def share_heaps() -> None:
    """For threads that are started from now on. A C library without such a setting is left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, HEAPS_MAX)
