"""The worker's HTTP process from start to exit code (interface first; the body is being written)."""

from __future__ import annotations

from worker.config import WorkerConfig


def run(config: WorkerConfig) -> int:
    """Serve until told to stop. Returns the exit code: 0 stopped, 1 the engine failed, 2 a user's mistake."""
    raise AssertionError("being written")
