"""Open loop: every request is sent at its time, whatever became of the earlier ones.

Owns the schedule, the bound on open requests, and each request's outcome. A request's times count from when it was
due, so that a client or server that falls behind cannot hide it. It must never retry: what fails is a result.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

from loadtests.live.prompts import PromptMaker
from loadtests.streaming_client import AnswerError, TimedAnswer, timed_stream
from loadtests.traces import Trace, TraceRequest

OPEN_MAX = 1024
LATE_S = 0.05          # from here on a request counts as sent late
KEEPALIVE_S = 2.0      # shorter than any server's, so that no request meets a connection that is about to close
REQUEST_TIMEOUT_S = 600.0
SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send, and with which headers. `name_sessions`: tell whose turn it is in the ways that routers with
    session affinity look for (`user`, x-session-id)."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    name_sessions: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """`speed` divides the trace's times. `open_max` bounds requests under way; beyond it they are sent late.
    `real_answers`: a conversation's next turn holds what the server really said, and so waits for it."""

    speed: float = 1.0
    open_max: int = OPEN_MAX
    timeout_s: float = REQUEST_TIMEOUT_S
    real_answers: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `due_s` counts from the beginning of the run, the other seconds from there. `error` None: answered
    well; else its kind, with `detail`."""

    index: int
    request: TraceRequest
    request_id: str
    due_s: float
    late_s: float
    total_s: float
    answer: TimedAnswer | None = None
    error: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.answer is None else self.late_s + self.answer.ttft_s

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        at = () if self.answer is None else self.answer.token_at_s
        return [later - earlier for earlier, later in pairwise(at)]


class Driver:
    """Sends one trace to one target, once. `keep` is given each outcome as soon as it is there."""

    def __init__(self, target: Target, prompts: PromptMaker, pace: Pace, *, run_id: str,
                 keep: Callable[[Outcome], None] | None = None) -> None:
        self._target = target
        self._prompts = prompts
        self._pace = pace
        self._run_id = run_id
        self._keep = keep
        self._last_turns: dict[str, asyncio.Task[Outcome]] = {}
        self._answers: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._places = asyncio.Semaphore(pace.open_max)
        self._began_at = 0.0
        self._tasks: list[asyncio.Task[Outcome]] = []

    async def run(self, trace: Trace, progress: Callable[[int, int], None] | None = None) -> list[Outcome]:
        """Until every request has ended; in the trace's order."""
        first = trace.requests[0].at_s
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=self._pace.timeout_s)
        async with (aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._target.headers) as http,
                    asyncio.TaskGroup() as group):
            self._began_at = time.perf_counter()
            count = _Counter(len(trace.requests), progress)
            for index, request in enumerate(trace.requests):
                due_s = (request.at_s - first) / self._pace.speed
                await asyncio.sleep(due_s - self._now_s())
                await self._places.acquire()
                before = self._last_turns.get(request.session)
                task = group.create_task(self._turn(http, index, request, due_s, before=before))
                task.add_done_callback(count)
                self._tasks.append(task)
                if self._pace.real_answers and request.messages:
                    self._last_turns[request.session] = task
        return self.ended()

    def ended(self) -> list[Outcome]:
        """Of the requests that have ended by now, also where the run was cancelled; in the trace's order."""
        return [task.result() for task in self._tasks if task.done() and not task.cancelled()]

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_at

    async def _turn(self, http: aiohttp.ClientSession, index: int, request: TraceRequest, due_s: float, *,
                    before: asyncio.Task[Outcome] | None) -> Outcome:
        """One request, behind the turn before it where it needs that one's answer."""
        try:
            if before is not None:
                earlier = await before
                due_s = max(due_s, earlier.due_s + earlier.total_s)
            outcome = await self._ask(http, index, request, due_s)
        finally:
            self._places.release()
        if self._keep is not None:
            self._keep(outcome)
        if self._pace.real_answers and request.messages and outcome.answer is not None:
            self._answers[request.session][len(request.messages)] = outcome.answer.text
        return outcome

    async def _ask(self, http: aiohttp.ClientSession, index: int, request: TraceRequest, due_s: float) -> Outcome:
        asked = self._prompts.asked(request, index, self._answers[request.session])
        request_id = f"{self._run_id}-{index}"
        headers, body = {"x-request-id": request_id}, asked.body
        if self._target.name_sessions and request.session:
            headers[SESSION_HEADER], body = request.session, {**body, "user": request.session}
        late_s = max(0.0, self._now_s() - due_s)
        answer, kind, detail = None, None, ""
        try:
            answer = await timed_stream(http, self._target.url + asked.path, body, headers)
        except AnswerError as error:
            kind, detail = error.kind, str(error)
        return Outcome(index, request, request_id, due_s, late_s, self._now_s() - due_s, answer, kind, detail)


class _Counter:
    """Counts tasks that are done, and shows it."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total, self._num_done, self._progress = total, 0, progress

    def __call__(self, _: object) -> None:
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, self._total)
