"""How many heaps malloc has in this process.

Owns a setting of the process. Must never: be asked for once threads run, which have heaps by then.
"""

from __future__ import annotations

import ctypes

# glibc gives every thread a heap of its own, and what is freed in one (a tokenizer is built in a thread) no other may
# use. Threads share one here, beside the event loop's: few are at work at a time.
HEAPS_MAX = 2
_M_ARENA_MAX = -8  # malloc.h


def share_heaps() -> None:
    """For threads that are started from now on. A C library without such a setting is left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, HEAPS_MAX)
