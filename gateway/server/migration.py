"""A stream whose worker is lost goes on at another one, without a seam (contract section 4, `x-headstart-resume`).

Owns: what is sent to whom after a worker was lost in mid-stream, one request for each unfinished choice, and the end
of such a stream. Must never: move a stream to a worker whose answers could differ (another hash scheme), send the
client a token twice, or go on where it is not known exactly what the client has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from gateway.knowledge.endpoint_table import Endpoint, EndpointTable
from gateway.relay.relay import (
    OverTime,
    RelayLimits,
    StreamEnd,
    Watch,
    Write,
    mid_stream_error,
    next_chunk,
    over_time,
    relay_bytes,
    uncancel,
)
from gateway.relay.retry import AttemptFailed, FirstAnswer, Walk, answer_from_any
from gateway.relay.sse import KEEPALIVE_COMMENT
from gateway.relay.transcript import KEPT_BYTES, Told, Transcript, WholeEvents
from gateway.relay.upstream import FailureKind, Upstream, UpstreamFailure, UpstreamRequest
from gateway.server.addressing import ChoiceToResume
from gateway.server.client_headers import MIGRATION_HEADER
from gateway.server.dispatch import Choosing, Dispatcher, RoutedPrompt
from gateway.server.placement import Placement
from gateway.server.prompt_work import longest_of
from gateway.server.request_record import RequestRecord
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.internal_request import TOKEN_IDS_HEADER, Resume
from worker.protocol.logs import get_logger
from worker.protocol.told_tokens import EVENT_END

_log = get_logger(__name__)

Address = Callable[[Endpoint, ChoiceToResume], UpstreamRequest]
Count = Callable[[str], None]


def wants_migration(text: str | None) -> bool:
    """From the client's header. ApiError 400 for a word it does not know."""
    if text not in (None, "on", "off"):
        raise invalid_request("Should be on or off.", MIGRATION_HEADER)
    return text != "off"


def tells_tokens(answer: FirstAnswer) -> bool:
    """Whether the worker tells which tokens it sends, so that another one could go on."""
    return TOKEN_IDS_HEADER in answer.response.headers


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream that has lost its worker. `lost_id` and `scheme` were the worker's, `address` builds the request for
    another one. Without a transcript or a scheme nobody can go on."""

    prompt: RoutedPrompt
    transcript: Transcript | None
    end: StreamEnd
    lost_id: str
    scheme: HashScheme | None
    record: RequestRecord
    address: Address
    include_usage: bool
    watch: Watch


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """`migrations_max`: how often each choice may move; the others are those of the relay and of retries."""

    relay: RelayLimits
    migrations_max: int
    max_retries: int
    first_byte_timeout_s: float


class _CannotGoOn(Exception):
    """`outcome` is a metric label; `error` what the client is told."""

    def __init__(self, outcome: str, error: ApiError) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.error = error


class Migrator:
    """Goes on with broken streams. `suspect` is told of lost workers, `count` of what became of each move."""

    def __init__(self, table: EndpointTable, dispatcher: Dispatcher, upstream: Upstream, *, limits: MigrationLimits,
                 suspect: Callable[[str], None], count: Count) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._limits = limits
        self._suspect = suspect
        self._count = count

    @property
    def is_on(self) -> bool:
        """Whether streams move at all."""
        return self._limits.migrations_max > 0

    async def go_on(self, broken: Broken, write: Write) -> StreamEnd:
        """The rest of the stream from other workers, and how it ended. What failed before stays the failure when
        nobody can go on."""
        self._suspect(broken.lost_id)
        told = Told(len(broken.prompt.prepared.prompts) * broken.prompt.num_choices)
        try:
            self._understand(broken, told)
            assert broken.scheme is not None, "understood, so it can be gone on with"
            journey = _Journey(self, broken, told, write)
            await journey.run()
            broken.record.completion_tokens = told.num_tokens
            await journey.send(told.ending(prompt_tokens=broken.prompt.prepared.num_tokens,
                                           cached_tokens=broken.record.cached_tokens or 0,
                                           include_usage=broken.include_usage))
        except OverTime:
            return replace(broken.end, failure=over_time(), can_move=False)
        except _CannotGoOn as why:
            self._count(why.outcome)
            _log.warning("migration_failed", request_id=broken.record.request_id, worker=broken.lost_id,
                         reason=why.outcome)
            return replace(broken.end, failure=why.error, can_move=False)
        except asyncio.CancelledError:
            if not broken.watch.is_stopping():
                raise
            uncancel()
            return replace(broken.end, can_move=False)
        return replace(broken.end, failure=None, can_move=False, last_chunk_at=time.monotonic())

    def _understand(self, broken: Broken, told: Told) -> None:
        assert broken.end.failure is not None, "only a broken stream is gone on with"
        transcript, failure = broken.transcript, broken.end.failure
        if transcript is None or broken.scheme is None or transcript.refused:
            raise _CannotGoOn("not_tried", failure)
        if not transcript.is_kept:
            raise _CannotGoOn("too_long", failure)
        try:
            told.replay(transcript.kept_blocks())
        except ValueError as nonsense:
            _log.warning("stream_not_understood", request_id=broken.record.request_id, reason=str(nonsense))
            raise _CannotGoOn("not_understood", failure) from nonsense

    def _differing(self, scheme: HashScheme | None) -> frozenset[str]:
        """Workers whose answers could differ from those of one with this scheme."""
        return frozenset(endpoint.endpoint_id for endpoint in self._table if endpoint.scheme != scheme)

    async def open(self, broken: Broken, walk: Walk, choice: ChoiceToResume) -> tuple[Placement, FirstAnswer]:
        """A worker that goes on with this choice. AttemptFailed when there is none."""
        prompts = choice.prompts
        prepared = broken.prompt.prepared
        hashes = {scheme: block_hashes(longest_of(prompts), scheme, prepared.salt.extra_keys)
                  for scheme in prepared.hashes}
        prompt = structs.replace(broken.prompt, prepared=structs.replace(prepared, prompts=prompts, hashes=hashes))
        scratch = RequestRecord(broken.record.request_id, broken.record.route)
        choosing = Choosing(self._dispatcher, prompt, scratch, suspect=self._suspect,
                            address=lambda endpoint: broken.address(endpoint, choice))
        differing = self._differing(broken.scheme)
        attempt, answer = await answer_from_any(
            self._upstream, lambda excluded, last: choosing(excluded | differing, last),
            max_retries=self._limits.max_retries, walk=walk,
            timeout_s=max(0.001, min(self._limits.first_byte_timeout_s, broken.watch.left_s)))
        assert isinstance(attempt, Placement), "Choosing hands out placements only"
        if answer.response.status != 200 or not tells_tokens(answer):
            answer.response.close()
            attempt.abandon()
            raise AttemptFailed("not_resumed", mid_stream_error(UpstreamFailure(FailureKind.RESET, "not resumed")),
                                retryable=False)
        self._count("ok")
        broken.record.moved_to.append(attempt.endpoint_id)
        return attempt, answer

    @property
    def limits(self) -> MigrationLimits:
        """What bounds a journey."""
        return self._limits


class _Journey:
    """One broken stream's way over other workers: every unfinished choice for itself, into one client's stream."""

    def __init__(self, migrator: Migrator, broken: Broken, told: Told, write: Write) -> None:
        self._migrator = migrator
        self._broken = broken
        self._told = told
        self._write = write
        self._writing = asyncio.Lock()
        self._written_at = time.monotonic()

    async def run(self) -> None:
        """Until every choice is finished. _CannotGoOn when one cannot be."""
        comments = asyncio.create_task(self._comments())
        try:
            if self._told.head is None:
                await self._move(None)
            legs = [asyncio.create_task(self._move(choice)) for choice in self._told.unfinished]
            try:
                if legs:
                    await asyncio.wait(legs, return_when=asyncio.FIRST_EXCEPTION)
                for leg in legs:
                    if leg.done():
                        leg.result()
            finally:
                await _end_all(legs)
        finally:
            await _end_all([comments])

    async def send(self, data: bytes) -> None:
        """Whole events to the client, one leg at a time."""
        async with self._writing:
            self._written_at = time.monotonic()
            self._broken.end.tail.feed(data)
            await relay_bytes(data, self._write, self._migrator.limits.relay)

    async def _comments(self) -> None:
        """Comments for a client that would hear nothing otherwise."""
        keepalive_s = self._migrator.limits.relay.keepalive_s
        while True:
            await asyncio.sleep(max(0.0, self._written_at + keepalive_s - time.monotonic()))
            if time.monotonic() - self._written_at >= keepalive_s:
                await self.send(KEEPALIVE_COMMENT)

    async def _move(self, choice: int | None) -> None:
        """Finish one choice; None: a stream of which nothing was told yet, from its beginning."""
        error = self._broken.end.failure
        assert error is not None, "only a broken stream is gone on with"
        lost, moves = self._broken.lost_id, 0
        while not self._is_finished(choice):
            if moves >= self._migrator.limits.migrations_max:
                raise _CannotGoOn("limit", error)
            moves += 1
            walk = Walk()
            walk.failed(lost, AttemptFailed("lost", error, same_worker=True))
            try:
                placement, answer = await self._migrator.open(self._broken, walk, self._request(choice))
            except AttemptFailed as nobody:
                raise _CannotGoOn("no_worker", error) from nobody
            lost = placement.endpoint_id
            try:
                placement.first_byte()
                await self._follow(answer, placement)
                if self._is_finished(choice):
                    placement.succeeded()
            except UpstreamFailure as again:
                placement.failed("lost")
                error = mid_stream_error(again)
            finally:
                answer.response.close()
                placement.release()
                self._told.worker_lost(choice)
            if self._told.refused:
                raise _CannotGoOn("refused", error)

    def _is_finished(self, choice: int | None) -> bool:
        # Once anything is known of a stream, each choice goes on by itself.
        return self._told.head is not None if choice is None else self._told.choices[choice].is_finished

    def _request(self, choice: int | None) -> ChoiceToResume:
        prompt, told = self._broken.prompt, self._told
        if choice is None or told.head is None:
            return ChoiceToResume(prompt.prepared.prompts, None)
        so_far = told.choices[choice]
        resume = Resume(generated=len(so_far.token_ids), choice=choice, sent_chars=so_far.sent_chars,
                        id=told.head["id"], created=told.head["created"], has_role=so_far.has_role)
        return ChoiceToResume([[*prompt.prepared.prompts[choice // prompt.num_choices], *so_far.token_ids]], resume)

    async def _follow(self, answer: FirstAnswer, placement: Placement) -> None:
        """Pass one worker's events on but for its end. UpstreamFailure when it too is lost."""
        events, chunk = WholeEvents(), answer.first_chunk
        watch = replace(self._broken.watch, is_lost=placement.is_lost)
        while chunk:
            try:
                passing = [block for block in events.feed(chunk) if self._told.take(block)]
                if len(events.held) > KEPT_BYTES:
                    raise ValueError("an event without end")
            except ValueError as nonsense:
                raise UpstreamFailure(FailureKind.RESET, str(nonsense)) from nonsense
            if passing:
                await self.send(EVENT_END.join([*passing, b""]))
            if events.lost:
                return
            chunk = await next_chunk(answer, self._migrator.limits.relay, watch)


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
