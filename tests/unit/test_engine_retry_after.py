"""How long a refused client is told to wait."""

from __future__ import annotations

import pytest

from worker.engine.engine_client import RETRY_AFTER_MAX_S, retry_after_s
from worker.engine.messages import EngineStats


@pytest.mark.parametrize(("waiting", "running", "rate", "told"), [
    (0, 0, 0.0, 1), (0, 0, 500.0, 1), (4000, 0, 500.0, 4), (4000, 2000, 500.0, 6),
    (10**9, 0, 500.0, RETRY_AFTER_MAX_S),
    (900, 0, 0.0, 1),
])
def test_the_wait_is_half_of_the_queue_within_bounds(waiting: int, running: int, rate: float, told: int) -> None:
    stats = EngineStats(waiting_prefill_tokens=waiting, running_prefill_tokens=running, prefill_tokens_per_s=rate)
    assert retry_after_s(stats) == str(told)
