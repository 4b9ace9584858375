"""One worker's KV events, followed without a hole: subscribe, snapshot, then every later batch in order.

Owns: the live socket, the replay socket and the worker's FeedStatus. Writes the index only through the IndexWriter.
Must never: apply a batch out of order, or call knowledge exact while a batch is missing.

A hole is filled from the worker's replay socket, or, when that no longer reaches back far enough, by a new snapshot.
Another epoch, a number going backwards, a replay that does not come or a lost connection end this life of the feed:
what the index believed is dropped at once, and everything starts over with a snapshot.
A feed that hears nothing asks for a replay from time to time, beginning with the last batch that it has: so a message
lost before a silence is found, and so is another worker at the same address, which cannot repeat that batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from urllib.parse import urlsplit

from gateway.knowledge.endpoint_table import FeedStatus
from gateway.knowledge.engines.headstart import (
    EventSockets,
    HeadstartWorker,
    WorkerNotReady,
    WorkerNotUnderstood,
    WorkerUnreachable,
)
from gateway.knowledge.event_socket import EventSocket, EventSocketLost
from gateway.knowledge.feed_sequence import FeedSequence, Verdict
from gateway.knowledge.index_writer import TURN_S, IndexWriter, NumberedBatch
from gateway.knowledge.zmtp import Peer, dealer, subscriber
from worker.protocol.block_hash import HashScheme
from worker.protocol.cache_events import (
    BlockRemoved,
    CacheEventError,
    EventBatch,
    ReplayEnd,
    decode_batch,
    encode_replay_request,
    parse_live_message,
    parse_replay_reply,
)
from worker.protocol.logs import get_logger

CONNECT_TIMEOUT_S = 10.0
# These two bound how long a claim may outlive its block, together with the worker's own delay.
REPLAY_IDLE_S = 0.75
QUIET_CHECK_S = 0.4
MAX_REPLAY_BATCHES = 20_000
BATCHES_PER_TURN = 32
ALONE_MAX_BYTES = 16 << 10   # what is longer may be too much for the turn in which it comes
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 5.0
_log = get_logger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class FeedBroken(Exception):
    """This life of the feed has ended; the message says why."""


class EventFeed:
    """Follows one epoch's event sockets until cancelled. `worker_url` gives the host where a socket says 0.0.0.0."""

    def __init__(self, worker: HeadstartWorker, sockets: EventSockets, *, scheme: HashScheme, writer: IndexWriter,
                 status: FeedStatus, quiet_check_s: float = QUIET_CHECK_S) -> None:
        self._worker = worker
        self._endpoint_id = worker.worker.endpoint_id
        self._topic = sockets.topic
        self._live_address = reachable_address(sockets.endpoint, worker.worker.url)
        self._replay_address = reachable_address(sockets.replay_endpoint, worker.worker.url)
        self._scheme = scheme
        self._writer = writer
        self._status = status
        self._quiet_check_s = quiet_check_s
        self._sequence = FeedSequence(None, 0)
        self._is_believed = False  # whether the index may hold anything by this feed

    async def run(self) -> None:
        """Follow, and start over when broken, with growing pauses."""
        pause_s = FIRST_RETRY_S
        while True:
            began_at = time.monotonic()
            try:
                await self._follow()
            except (FeedBroken, EventSocketLost, WorkerUnreachable, WorkerNotReady, WorkerNotUnderstood) as why:
                self._status.detail = str(why)
                _log.info("event_feed_broken", worker=self._endpoint_id, reason=str(why))
            except Exception as error:
                # Our own bug; a feed that ended would leave its worker's blocks to rot in the index.
                self._status.detail = f"the event feed failed: {error!r}"
                _log.exception("event_feed_failed", worker=self._endpoint_id)
            finally:
                self._status.in_sequence = False
            await self._forget()
            if time.monotonic() - began_at > MAX_RETRY_S:
                pause_s = FIRST_RETRY_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _forget(self) -> None:
        """Drop what the index believes by this feed; what we sent there ourselves is believed in its place."""
        if self._is_believed:
            self._is_believed = False
            await self._writer.forget(self._endpoint_id)

    async def _follow(self) -> None:
        topic = self._topic.encode()
        with (contextlib.closing(await _connected(self._live_address, partial(subscriber, topic))) as live,
              contextlib.closing(await _connected(self._replay_address, dealer)) as replay):
            await self._resync()
            await _first_of(self._consume(live, replay), live.lost(), replay.lost())

    async def _resync(self) -> None:
        """Replace what the index believes by the worker's snapshot; batches from its barrier on follow."""
        self._status.in_sequence = False
        await self._forget()
        snapshot = await self._worker.snapshot()
        header = snapshot.header
        if header.hash_scheme_digest != self._scheme.digest():
            raise FeedBroken("the snapshot is of another hash scheme: the worker was restarted with other settings")
        self._is_believed = True
        await self._writer.restart(self._endpoint_id, self._scheme, header.epoch, snapshot.blocks)
        self._sequence = FeedSequence(header.epoch, header.barrier_seq)
        self._status.num_resyncs += 1

    async def _consume(self, live: EventSocket, replay: EventSocket) -> None:
        # What was published between the snapshot and the moment our subscription took effect is in the replay.
        await self._replay(replay)
        live.take_alone = self._take_alone
        while True:
            messages = await live.receive(BATCHES_PER_TURN, self._quiet_check_s)
            if messages:
                await self._take(messages, replay)
            else:
                await self._check_quiet(replay)

    def _take_alone(self, frames: list[bytes]) -> bool:
        """_take() of one message without a turn of its own, if nothing about it needs one."""
        if len(frames[-1]) > ALONE_MAX_BYTES:
            return False
        seq, batch = self._decode(frames)
        ready = [NumberedBatch(seq, batch)]
        if (self._sequence.judge(seq, batch.epoch) is not Verdict.NEXT
                or not self._writer.apply_at_once(self._endpoint_id, ready)):
            return False
        self._sequence.applied(seq)
        self._applied(ready)
        return True

    async def _take(self, messages: Sequence[list[bytes]], replay: EventSocket) -> None:
        """Apply the messages that come next, in one change; replay in front of the first that does not."""
        ready: list[NumberedBatch] = []
        turn_ends_at = time.perf_counter() + TURN_S
        for frames in messages:
            if time.perf_counter() >= turn_ends_at:
                await asyncio.sleep(0)
                turn_ends_at = time.perf_counter() + TURN_S
            seq, batch = self._decode(frames)
            verdict = self._sequence.judge(seq, batch.epoch)
            if verdict is Verdict.GAP:
                self._status.in_sequence = False
                self._status.num_gaps += 1
                await self._apply(ready)
                ready = []
                await self._replay(replay)
                verdict = self._sequence.judge(seq, batch.epoch)
            if verdict is Verdict.NEXT:
                self._sequence.applied(seq)
                ready.append(NumberedBatch(seq, batch))
            elif verdict is Verdict.DUPLICATE:
                self._status.num_duplicates += 1
            else:
                raise FeedBroken("the worker began another life" if verdict is Verdict.RESTART
                                 else f"batches before {seq} stay missing")
        await self._apply(ready)

    async def _apply(self, batches: Sequence[NumberedBatch]) -> None:
        if not batches:
            return
        await self._writer.apply(self._endpoint_id, batches)
        self._applied(batches)

    def _applied(self, batches: Sequence[NumberedBatch]) -> None:
        self._status.num_applied_batches += len(batches)
        self._status.num_evicted_blocks += _num_removed(batches)
        self._status.lag_s = max(0.0, time.time() - batches[-1].batch.ts)

    async def _check_quiet(self, replay: EventSocket) -> None:
        before = self._sequence.next_seq
        await self._replay(replay)
        if self._sequence.next_seq != before:
            self._status.num_gaps += 1  # the live socket never told us of these

    async def _replay(self, replay: EventSocket) -> None:
        """Apply everything from the next number on; a new snapshot when the worker no longer has it.

        To the end, always: what is left on the socket would answer the next request.
        """
        self._status.num_replays += 1
        batches: list[NumberedBatch] = []
        sequence = self._sequence
        is_known = sequence.last_seq is None   # whether who answers has shown to be whom we follow
        replay.send(encode_replay_request(sequence.last_seq or 0))
        num_replies, has_ended = 0, False
        while not has_ended:
            messages = await replay.receive(BATCHES_PER_TURN, REPLAY_IDLE_S)
            num_replies += len(messages)
            if not messages:
                raise FeedBroken(f"no replay from {self._replay_address}")
            if num_replies > MAX_REPLAY_BATCHES:
                raise FeedBroken(f"a replay of more than {MAX_REPLAY_BATCHES} batches")
            for frames in messages:
                replayed = self._decode_replayed(frames)
                if has_ended := replayed is None:
                    break
                is_known |= await self._judge_replayed(replayed, batches)
        if not is_known:
            raise FeedBroken("it cannot repeat its own last batch: the worker began another life")
        await self._apply(batches)
        self._status.in_sequence = True
        self._status.detail = ""

    async def _judge_replayed(self, replayed: NumberedBatch, batches: list[NumberedBatch]) -> bool:
        """Into `batches`, if it is the next one; whether it shows that the worker is the one we follow."""
        seq, batch = replayed
        if self._sequence.is_last(seq, batch.epoch):
            return True
        was_missed = False
        verdict = self._sequence.judge(seq, batch.epoch)
        if verdict is Verdict.GAP:
            await self._resync()  # what we miss has left the worker's ring; later ones may still follow
            was_missed = True
            batches.clear()
            verdict = self._sequence.judge(seq, batch.epoch)
        if verdict in (Verdict.RESTART, Verdict.GAP):
            raise FeedBroken("the replay does not fit the snapshot: the worker began another life")
        if verdict is Verdict.NEXT:
            self._sequence.applied(seq)
            batches.append(replayed)
        return was_missed

    def _decode(self, frames: list[bytes]) -> tuple[int, EventBatch]:
        try:
            message = parse_live_message(frames)
            return message.seq, decode_batch(message.payload)
        except CacheEventError as error:
            raise self._unreadable("an event message", error) from error

    def _decode_replayed(self, frames: list[bytes]) -> NumberedBatch | None:
        """None: the replay has ended."""
        try:
            reply = parse_replay_reply(frames)
            return None if isinstance(reply, ReplayEnd) else NumberedBatch(reply.seq, decode_batch(reply.payload))
        except CacheEventError as error:
            raise self._unreadable("a replayed batch", error) from error

    def _unreadable(self, what: str, error: CacheEventError) -> FeedBroken:
        """What cannot be read is a hole like any other: this life of the feed ends and a snapshot fills it."""
        self._status.num_undecodable += 1
        return FeedBroken(f"{what} cannot be read: {error}")


def reachable_address(address: str, worker_url: str) -> str:
    """The address to connect to: the port that the worker states, at the host where it was configured to be.

    What a worker says is not enough to make the gateway connect to another host. Two names of this machine are one.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    worker_host = urlsplit(worker_url).hostname or "127.0.0.1"
    if not address.startswith("tcp://") or (host in _LOOPBACK and worker_host in _LOOPBACK):
        return address
    return f"tcp://[{worker_host}]:{port}" if ":" in worker_host else f"tcp://{worker_host}:{port}"


async def _connected(address: str, new_peer: Callable[[], Peer]) -> EventSocket:
    try:
        return await EventSocket.connected(address, new_peer, CONNECT_TIMEOUT_S)
    except TimeoutError as late:
        raise FeedBroken(f"no event socket answers at {address}; "
                         "is --events-host reachable from the gateway?") from late


async def _first_of(*watchers: Coroutine[None, None, None]) -> None:
    """Run until one of them ends, which it does by raising; then stop the others."""
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _num_removed(batches: Sequence[NumberedBatch]) -> int:
    return sum(len(event.block_hashes) for numbered in batches for event in numbered.batch.events
               if isinstance(event, BlockRemoved))
