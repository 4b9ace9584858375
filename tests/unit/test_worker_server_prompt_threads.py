"""Where prompt work runs, and what happens at its limit and to callers who leave."""

from __future__ import annotations

import asyncio
import threading

import pytest

from worker.protocol.api_error import ApiError
from worker.server import prompt_threads
from worker.server.prompt_threads import ON_LOOP_BYTES_MAX, PromptThreads


async def test_short_work_stays_and_long_work_leaves_the_loop() -> None:
    threads = PromptThreads()
    assert await threads.run(ON_LOOP_BYTES_MAX, threading.current_thread) is threading.current_thread()
    assert await threads.run(ON_LOOP_BYTES_MAX + 1, threading.current_thread) is not threading.current_thread()


async def test_an_error_of_the_work_is_the_callers() -> None:
    def fail() -> None:
        raise ApiError(400, "invalid_request", "no", param="messages")

    with pytest.raises(ApiError, match="no"):
        await PromptThreads().run(ON_LOOP_BYTES_MAX + 1, fail)


async def test_at_the_limit_a_job_is_refused_until_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_threads, "JOBS_MAX", 1)
    threads, go_on = PromptThreads(), threading.Event()
    first = asyncio.ensure_future(threads.run(ON_LOOP_BYTES_MAX + 1, go_on.wait))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await threads.run(ON_LOOP_BYTES_MAX + 1, go_on.wait)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    go_on.set()
    assert await first
    assert await threads.run(ON_LOOP_BYTES_MAX + 1, lambda: 7) == 7


async def test_a_caller_who_leaves_frees_its_place_only_when_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_threads, "JOBS_MAX", 1)
    threads, go_on, ended = PromptThreads(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        go_on.wait()
        loop.call_soon_threadsafe(loop.call_soon, ended.set)

    caller = asyncio.ensure_future(threads.run(ON_LOOP_BYTES_MAX + 1, work))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(ApiError):
        await threads.run(ON_LOOP_BYTES_MAX + 1, work)
    go_on.set()
    await ended.wait()
    async with asyncio.timeout(10):
        while True:     # the job's end reaches the loop a moment after the thread says so
            try:
                assert await threads.run(ON_LOOP_BYTES_MAX + 1, lambda: 7) == 7
                return
            except ApiError:
                await asyncio.sleep(0)
