"""Which cores this worker's engine computes on, for routers: workers on the same cores slow each other.

Owns the id: equal for processes of one boot of one machine that may use the same cores, and telling nothing else.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ID_HEX_CHARS = 16


def cpu_share(num_threads: int) -> dict[str, Any] | None:
    """`GET /kv` says so as `cpu`; None when the engine computes elsewhere, or nobody can tell."""
    cpu_id = _cpu_id()
    return None if cpu_id is None or not num_threads else {
        "id": cpu_id, "cores": len(usable_cores()), "threads": num_threads}


def usable_cores() -> list[int]:
    """Those that this process may run on, by number."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@cache
def _cpu_id() -> str | None:
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError:
        return None
    cores = ",".join(map(str, usable_cores()))
    return hashlib.sha256(f"headstart cpu {boot_id} {cores}".encode()).hexdigest()[:ID_HEX_CHARS]
