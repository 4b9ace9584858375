"""KV events over ZeroMQ in vLLM's format: a PUB socket, and a ROUTER that replays what a reader missed.

Owns both sockets, the sequence numbers, the replay ring and the mirror of the pool. One publisher is one life of the
worker: its `epoch` is random, so a restart is never mistaken for a continuation.

Sequence: 0 is always an AllBlocksCleared (the pool of a new process is empty, and a reader that outlived the old one
learns so even if it missed the epoch), then one number per step that changed the pool. A batch is applied to the
mirror and numbered in one go, with no await between: a snapshot's barrier is exact.

Never waits for a reader: PUB drops what a slow one cannot take, and the gap in the numbers sends it to the replay
socket or to GET /kv/snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from zmq.asyncio import Context
from zmq.asyncio import Socket as AsyncSocket
from zmq.constants import Flag, SocketOption, SocketType
from zmq.error import ZMQError
from zmq.sugar.socket import Socket

from worker.protocol.cache_events import (
    AllBlocksCleared,
    BlockStored,
    CacheEvent,
    CacheEventError,
    encode_batch,
    encode_live_message,
    encode_replay_end,
    encode_replay_reply,
    parse_replay_request,
)
from worker.protocol.logs import get_logger
from worker.server.block_mirror import BlockMirror

RING_BATCHES_MAX = 10_000
PUB_HIGH_WATER_MARK = 100_000
REPLAY_SEND_TIMEOUT_S = 5.0
LINGER_MS = 200
_log = get_logger("worker.server.events_publisher")


class PortTakenError(Exception):
    """An events port cannot be bound. The message names the address and the setting."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool's content before batch `barrier_seq`: that one and later ones apply on top of it."""

    epoch: str
    barrier_seq: int
    blocks: list[BlockStored]


class EventsPublisher:
    """`open` binds, `publish` numbers and sends a step's events, `close` lets both sockets go."""

    def __init__(self, host: str, port: int) -> None:
        self.epoch = secrets.token_hex(8)
        self.topic = ""
        self._host = host
        self._context = Context()
        # A plain socket: sending to a PUB never waits, so there is nothing to await.
        self._pub: Socket = self._context.socket(SocketType.PUB, socket_class=Socket)
        self._router: AsyncSocket = self._context.socket(SocketType.ROUTER)
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING_BATCHES_MAX)
        self._mirror = BlockMirror()
        self._next_seq = 0
        self._replay_task: asyncio.Task[None] | None = None
        self.endpoint = ""
        self.replay_endpoint = ""
        self._bind(port)

    def open(self, *, topic: str) -> None:
        """Start answering replays and publish batch 0. Call once, on the running loop."""
        self.topic = topic
        self._replay_task = asyncio.get_running_loop().create_task(self._serve_replays(), name="kv-event-replay")
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Number and send one batch; an empty one is not sent."""
        if not events:
            return
        payload = encode_batch(events, ts=time.time(), dp_rank=None, epoch=self.epoch)
        self._mirror.apply(events)
        seq = self._next_seq
        self._next_seq += 1
        self._ring.append((seq, payload))
        self._pub.send_multipart(encode_live_message(self.topic.encode(), seq, payload), Flag.NOBLOCK)

    def snapshot(self) -> Snapshot:
        """A frozen copy of what all batches so far add up to."""
        return Snapshot(self.epoch, self._next_seq, self._mirror.blocks())

    async def close(self) -> None:
        """Stop replaying and close the sockets; what is queued gets LINGER_MS to leave."""
        if self._replay_task is not None:
            self._replay_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replay_task
        self._pub.close(LINGER_MS)
        self._router.close(LINGER_MS)
        self._context.destroy(LINGER_MS)

    def _bind(self, port: int) -> None:
        self._pub.setsockopt(SocketOption.SNDHWM, PUB_HIGH_WATER_MARK)
        self._router.setsockopt(SocketOption.SNDHWM, RING_BATCHES_MAX)
        # Without this a ROUTER drops what a slow reader cannot take, and the reader would see a hole in a replay.
        self._router.setsockopt(SocketOption.ROUTER_MANDATORY, 1)
        if ":" in self._host:
            self._pub.setsockopt(SocketOption.IPV6, 1)
            self._router.setsockopt(SocketOption.IPV6, 1)
        self.endpoint = self._bind_one(self._pub, port)
        self.replay_endpoint = self._bind_one(self._router, port + 1 if port else 0)

    def _bind_one(self, socket: Socket | AsyncSocket, port: int) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        wanted = f"tcp://{host}:{port or '*'}"
        try:
            socket.bind(wanted)
        except ZMQError as error:
            self._pub.close(0)
            self._router.close(0)
            raise PortTakenError(f"cannot bind the KV event socket {wanted}: {error.strerror}; "
                                 "choose another --events-host or --events-port (it takes two ports)") from error
        return str(socket.getsockopt_string(SocketOption.LAST_ENDPOINT))

    async def _serve_replays(self) -> None:
        """Answer requests one after another; [identity, ...request] in, the ring and an end mark out."""
        while True:
            identity, *request = await self._router.recv_multipart()
            try:
                await self._replay(identity, parse_replay_request(request))
            except CacheEventError as error:
                _log.warning("replay_request_ignored", reason=str(error))
            except (ZMQError, TimeoutError) as error:
                _log.warning("replay_given_up", reason=str(error) or "the reader does not take its messages")

    async def _replay(self, identity: bytes, start_seq: int) -> None:
        """Everything still in the ring from `start_seq` on, then the end mark.

        The reader sees by the first number whether history was lost. The copy is taken at once: batches published
        meanwhile reach the reader on the live socket.
        """
        topic = self.topic.encode()
        num_missing = max(0, self._next_seq - start_seq)
        for seq, payload in reversed(list(islice(reversed(self._ring), num_missing))):
            await self._send_to(identity, encode_replay_reply(topic, seq, payload))
        await self._send_to(identity, encode_replay_end())

    async def _send_to(self, identity: bytes, frames: list[bytes]) -> None:
        async with asyncio.timeout(REPLAY_SEND_TIMEOUT_S):
            await self._router.send_multipart([identity, *frames])
