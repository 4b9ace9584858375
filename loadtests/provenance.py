"""Where, when and of what a figure was measured: what every result file carries.

Owns the facts of this machine and this tree. A result without them is worth nothing later.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

ASK_GIT_S = 10


def provenance() -> dict[str, object]:
    """Date, commit, machine, and how busy the machine was when this was asked."""
    return {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine(),
            "python": platform.python_version(), "load_1m": round(os.getloadavg()[0], 2)}


def machine() -> str:
    """How many cores of which processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {named[0] if named else platform.processor() or platform.machine()}"


@cache
def commit() -> str:
    """Of the tree that this file lies in, when first asked; 'unknown' outside a repository or when git is slow."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent,
                              timeout=ASK_GIT_S, capture_output=True, text=True, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
