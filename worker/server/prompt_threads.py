"""Where long prompts are parsed, rendered and tokenised: off the event loop, a bounded number at a time.

Owns the threads and the limit on work that waits for them. Short work stays on the loop: a hop costs more than it
frees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from worker.protocol.api_error import ApiError

ON_LOOP_BYTES_MAX = 1024    # prompt work runs at about 1 MB/s: up to a millisecond
THREADS_MAX = 2
JOBS_MAX = 256              # running and waiting; each holds its body in memory

T = TypeVar("T")


class PromptThreads:
    """THREADS_MAX threads and the jobs that run or wait for one. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="prompt")
        self._num_jobs = 0

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, done here when its input is short and in a prompt thread when not.

        ApiError 429 `queue_full` when JOBS_MAX others are at it. A caller who is cancelled leaves at once; the job
        goes on to its end and counts until then.
        """
        if num_bytes <= ON_LOOP_BYTES_MAX:
            return work()
        if self._num_jobs >= JOBS_MAX:
            raise ApiError(429, "queue_full", f"{JOBS_MAX} long prompts are being read already; try again later.",
                           headers={"Retry-After": "1"})
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._num_jobs += 1
        job.add_done_callback(self._finished)
        return await asyncio.shield(job)

    def _finished(self, job: asyncio.Future[T]) -> None:
        self._num_jobs -= 1
        if not job.cancelled():
            job.exception()     # retrieved: a caller who left must not make asyncio complain
