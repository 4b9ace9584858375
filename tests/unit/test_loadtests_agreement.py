"""What the agreement bench learns from, and how it tells who used the cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.bench.agreement import PROMPT_MAX, SHORT_ANSWER, Sent, parts_of, serving_work
from loadtests.live.cores_used import CoresUsed, others_of, watched_cores
from loadtests.live.waiting import until
from loadtests.traces import Trace, TraceError, TraceRequest


def trace(*prompts: int) -> Trace:
    return Trace("t", "test", 16, tuple(TraceRequest(float(at), tokens, 50, ()) for at, tokens in enumerate(prompts)))


def test_what_is_learnt_from_is_not_compared() -> None:
    parts = parts_of(trace(10, PROMPT_MAX + 1, 20, 30, 40, 50), num_requests=2, output_max=16)
    assert [[request.prompt_tokens for request in part.requests] for part in parts] == [[10, 20], [30, 40], [30, 40]]
    assert [part.requests[0].output_tokens for part in parts] == [16, 16, SHORT_ANSWER]
    with pytest.raises(TraceError, match="t has 3 requests that fit, for 2 to compare and as many"):
        parts_of(trace(1, 2, 3), num_requests=2, output_max=16)


def test_a_requests_share_of_serving_is_told_from_a_tokens() -> None:
    def sent(requests: int, tokens: int) -> Sent:
        used = CoresUsed(serving_s={"gateway": 2e-3 * requests, "client": 1e-4 * tokens})
        return Sent(trace(1), (), used, {"requests": requests, "completion_tokens": tokens})
    found = serving_work([sent(100, 1600), sent(100, 200), sent(50, 800)])
    assert (found.request_s, found.token_s) == pytest.approx((2e-3, 1e-4))


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20))
def test_others_never_give_time_back(totals: list[float]) -> None:
    each = others_of(totals)
    assert len(each) == len(totals) - 1
    assert min(each, default=0.0) >= 0.0
    assert sum(each) == pytest.approx(max(totals) - totals[0])


TICKS = 30
COMPUTES = "while True: pass"
SERVES = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def programs(*arguments: list[str]) -> Iterator[list[int]]:
    """Process ids. What they start themselves ends too."""
    running = [subprocess.Popen(each) for each in arguments]
    try:
        yield [each.pid for each in running]
    finally:
        for each in running:
            for child in children_of(each.pid):
                os.kill(child, signal.SIGKILL)
            each.kill()
            each.wait()


async def used_while_both_compute(worker: int, other: int, gateway: int) -> CoresUsed:
    begun: dict[int, int] = {}

    async def have_computed() -> bool:
        for pid in (*children_of(worker), other):
            begun.setdefault(pid, cpu_ticks(pid))
        return len(begun) == 2 and all(cpu_ticks(pid) >= ticks + TICKS for pid, ticks in begun.items())
    async with watched_cores([worker], gateway) as used:
        await until(have_computed, "both at work")
    return used


def test_a_workers_child_is_its_engine_and_others_are_others() -> None:
    with programs([sys.executable, "-c", SERVES], [sys.executable, "-c", COMPUTES], ["sleep", "100"]) as pids:
        worker, other, gateway = pids
        used = asyncio.run(used_while_both_compute(worker, other, gateway))
    assert used.engines_s >= TICKS / os.sysconf("SC_CLK_TCK")
    assert set(used.serving_s) == {"gateway", "workers_servers", "client"}
    assert used.serving_s["gateway"] == 0
    assert sum(used.others) > 0
