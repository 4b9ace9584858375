"""Up to the first byte: which answers are the client's, and which are another worker's to give.

Owns: the verdict on a worker's first answer, and the bounded walk from one worker to the next.
Must never: retry once a byte has been shown to the client, or for a mistake that is the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway import errors
from gateway.relay.upstream import FailureKind, Upstream, UpstreamFailure, UpstreamResponse
from worker.protocol.api_error import ApiError

MAX_REFUSAL_BYTES = 64 * 1024
REFUSAL_READ_TIMEOUT_S = 5.0
LOST_LOOK_S = 0.25
TIMEOUT, DEADLINE = "timeout", "deadline"  # the worker's limit, or the client's own
_NOT_THE_CLIENTS = (401, 403, 429)
Opened = tuple[UpstreamResponse, bytes]


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """A response whose first body bytes are here; nothing of it has been sent to the client yet."""

    response: UpstreamResponse
    first_chunk: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker's own refusal, to be passed on as it came when nobody else takes the request."""

    status: int
    content_type: str
    retry_after: str | None
    body: bytes


class AttemptFailed(Exception):
    """One worker did not answer. `reason` is a metric label; `outcome` is for the client if this was the last try.

    `same_worker`: the connection failed rather than the worker, so that trying it again is worth it when it is alone.
    """

    def __init__(self, reason: str, outcome: ApiError | Refusal, *, retryable: bool = True,
                 same_worker: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outcome = outcome
        self.retryable = retryable
        self.same_worker = same_worker


class Attempt(Protocol):
    """A booked worker: how to ask it, and how to undo the booking."""

    @property
    def endpoint_id(self) -> str:
        """The worker's id."""
        ...

    @property
    def waited_s(self) -> float:
        """How long it has been asked already."""
        ...

    async def open(self, upstream: Upstream) -> UpstreamResponse:
        """Ask it, or go on where it has been asked already. UpstreamFailure."""
        ...

    def is_lost(self) -> bool:
        """Whether this worker has become unready while another one could take the request."""
        ...

    def abandon(self) -> None:
        """Undo everything booked. Idempotent."""
        ...

    def failed(self, reason: str) -> None:
        """abandon(), and remember it of the worker."""
        ...


# Given the workers already tried and why the last one failed: the next attempt, booked, or None when nobody is left.
Choose = Callable[[frozenset[str], "AttemptFailed | None"], "Attempt | None"]


async def first_answer(upstream: Upstream, attempt: Attempt, *, timeout_s: float,
                       timeout_reason: str = TIMEOUT) -> FirstAnswer:
    """Send to one worker and await its first body bytes; AttemptFailed when the answer is not one for the client."""
    try:
        async with _Lookout(attempt, timeout_s, timeout_reason):
            response, chunk = await _open(upstream, attempt)
    except UpstreamFailure as failure:
        # Where workers are is for the header that may say so, and for the log.
        lost = errors.worker_failed(f"The worker could not be reached ({failure.kind.value}).")
        raise AttemptFailed(failure.kind.value, lost, same_worker=failure.kind is FailureKind.RESET) from failure
    return await _judge(response, chunk)


class _Lookout:
    """While its block waits for a worker: every LOST_LOOK_S, is the worker lost or the time over? One timer, and no
    task beside the one that waits. Then the block ends in AttemptFailed; a cancellation from outside passes through.
    """

    def __init__(self, attempt: Attempt, timeout_s: float, timeout_reason: str) -> None:
        self._attempt = attempt
        self._timeout_reason = timeout_reason
        self._timeout_s = timeout_s
        self._failure: AttemptFailed | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._task, self._loop = task, asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        left_s = max(0.0, self._timeout_s - self._attempt.waited_s)
        self._due_at = self._loop.time() + left_s
        self._timer = self._loop.call_later(min(LOST_LOOK_S, left_s), self._look)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._failure is None:
            return
        is_ours_alone = self._task.uncancel() <= self._cancelling
        if is_ours_alone and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._failure

    def _look(self) -> None:
        left_s = self._due_at - self._loop.time()
        if left_s <= 0:
            what = ("The deadline of this request (x-request-deadline-ms) came before the answer"
                    if self._timeout_reason == DEADLINE else f"The worker sent nothing for {self._timeout_s:g} s")
            self._failure = AttemptFailed(self._timeout_reason, errors.worker_timeout(f"{what}."), retryable=False)
        elif self._attempt.is_lost():
            self._failure = AttemptFailed("unready", errors.worker_failed("The worker stopped answering."))
        else:
            self._timer = self._loop.call_later(min(LOST_LOOK_S, left_s), self._look)
            return
        self._task.cancel()


async def _open(upstream: Upstream, attempt: Attempt) -> Opened:
    response = await attempt.open(upstream)
    try:
        return response, await response.read_chunk()
    except BaseException:
        response.close()
        raise


def is_coded(headers: Mapping[str, str]) -> bool:
    """Whether a worker's body has to be decoded first, though it was told that nobody would."""
    return headers.get("content-encoding", "identity").lower() != "identity"


async def _judge(response: UpstreamResponse, chunk: bytes) -> FirstAnswer:
    status = response.status
    if is_coded(response.headers):
        response.close()
        raise AttemptFailed("worker_error", errors.worker_failed(
            "The worker answered in a content coding, which was not asked for."))
    if 200 <= status < 300 and chunk:
        return FirstAnswer(response, chunk)
    if 400 <= status < 500 and status not in _NOT_THE_CLIENTS:
        return FirstAnswer(response, chunk)
    try:
        if status in (401, 403):
            # No credential of the client's goes to a worker, so this is between the worker and us.
            raise AttemptFailed("refused", errors.worker_failed(
                "The worker refused the gateway: give both the same HEADSTART_WORKER_TOKEN or api_key."))
        if status == 429:
            raise AttemptFailed("busy", await _read_refusal(response, chunk))
        if status == 503:
            raise AttemptFailed("unavailable", errors.no_worker(
                "The worker is not taking requests yet; try again shortly."))
        what = "an empty answer" if status < 300 else f"status {status}"
        raise AttemptFailed("worker_error", errors.worker_failed(f"The worker failed ({what})."))
    finally:
        response.close()


async def _read_refusal(response: UpstreamResponse, chunk: bytes) -> Refusal:
    body = bytearray(chunk)
    try:
        async with asyncio.timeout(REFUSAL_READ_TIMEOUT_S):
            while chunk and len(body) < MAX_REFUSAL_BYTES:
                chunk = await response.read_chunk()
                body += chunk
    except (TimeoutError, UpstreamFailure):
        pass  # half a refusal is still a refusal; its status and Retry-After are what counts
    return Refusal(response.status, response.headers.get("content-type", "application/json"),
                   response.headers.get("retry-after"), bytes(body))


@dataclass(slots=True)
class Walk:
    """From worker to worker: those tried, and why the last one failed. `begun`: who has been asked already."""

    begun: Attempt | None = None
    tried: set[str] = field(default_factory=set)
    last: AttemptFailed | None = None
    num_failed: int = 0

    def failed(self, endpoint_id: str, failure: AttemptFailed) -> None:
        """This worker did not answer, or not to the end."""
        self.num_failed += 1
        self.tried.add(endpoint_id)
        self.last = failure


async def answer_from_any(upstream: Upstream, choose: Choose, *, max_retries: int, timeout_s: float,
                          timeout_reason: str = TIMEOUT, walk: Walk | None = None) -> tuple[Attempt, FirstAnswer]:
    """The first worker's answer that is the client's to have, trying at most `max_retries` others.

    `walk`: where it has led so far. Raises the last AttemptFailed, or ApiError(503) when no worker could be chosen at
    all.
    """
    walk = walk or Walk()
    while walk.num_failed <= max_retries:
        attempt = _next_attempt(choose, walk)
        if attempt is None:
            break
        try:
            return attempt, await first_answer(upstream, attempt, timeout_s=timeout_s,
                                               timeout_reason=timeout_reason)
        except AttemptFailed as failure:
            attempt.failed(failure.reason)
            walk.failed(attempt.endpoint_id, failure)
            if not failure.retryable:
                raise
        except BaseException:
            attempt.abandon()
            raise
    raise walk.last or errors.no_worker("No worker for this model is ready; see /admin/workers.")


def _next_attempt(choose: Choose, walk: Walk) -> Attempt | None:
    last = walk.last
    if walk.begun is not None:
        begun, walk.begun = walk.begun, None
        return begun
    attempt = choose(frozenset(walk.tried), last)
    if attempt is None and last is not None and last.same_worker:
        # A connection may break without the worker being to blame. Alone, the worker gets another try.
        return choose(frozenset(), last)
    return attempt
