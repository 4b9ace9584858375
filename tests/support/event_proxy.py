"""Between a worker's event sockets and the gateway: loses messages, holds them back, and outlives the worker.

Real sockets on both sides. The gateway's connection stays up whatever happens behind, as with a load balancer or a
service mesh in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import zmq
from zmq.asyncio import Context, Socket

from tests.support.stub_worker import StubWorker
from worker.protocol.cache_events import ReplayEnd, parse_replay_reply


class EventProxy:
    """`lost_ratio` of the live messages vanish; while `holding`, they are kept until release()."""

    def __init__(self, context: Context, seed: int, lost_ratio: float = 0.0) -> None:
        self.lost_ratio = lost_ratio
        self.holding = False
        self.num_lost = 0
        self.num_passed = 0
        self._chance = random.Random(seed)
        self._context = context
        self._held: list[list[bytes]] = []
        self._live, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket in (self._live, self._replay):
            socket.bind("tcp://127.0.0.1:*")
        self.addresses = (self._live.getsockopt_string(zmq.LAST_ENDPOINT),
                          self._replay.getsockopt_string(zmq.LAST_ENDPOINT))
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self, stub: StubWorker) -> None:
        """Pass on this life of the worker from now on, and no other."""
        await self.detach()
        live_address, replay_address = stub.own_event_addresses
        live = self._context.socket(zmq.SUB)
        live.subscribe(b"")
        live.connect(live_address)
        self._tasks = [asyncio.create_task(self._pass_live(live)),
                       asyncio.create_task(self._pass_replays(replay_address))]
        stub.event_addresses = self.addresses
        await asyncio.sleep(0.1)  # the subscription takes effect

    async def detach(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def release(self) -> None:
        """What was held back arrives now, behind whatever came since."""
        self.holding = False
        held, self._held = self._held, []
        for frames in held:
            await self._live.send_multipart(frames)

    async def _pass_live(self, live: Socket) -> None:
        try:
            while True:
                frames = await live.recv_multipart()
                if self.holding:
                    self._held.append(frames)
                elif self._chance.random() < self.lost_ratio:
                    self.num_lost += 1
                else:
                    self.num_passed += 1
                    await self._live.send_multipart(frames)
        finally:
            live.close(0)

    async def _pass_replays(self, address: str) -> None:
        while True:
            identity, *request = await self._replay.recv_multipart()
            dealer = self._context.socket(zmq.DEALER)
            try:
                dealer.connect(address)
                await dealer.send_multipart(request)
                while True:
                    reply = await dealer.recv_multipart()
                    await self._replay.send_multipart([identity, *reply])
                    if isinstance(parse_replay_reply(reply), ReplayEnd):
                        break
            finally:
                dealer.close(0)


@contextlib.asynccontextmanager
async def proxied(*stubs: StubWorker, lost_ratio: float = 0.0) -> AsyncIterator[list[EventProxy]]:
    """A proxy for each of these running workers."""
    context = Context()
    proxies = [EventProxy(context, seed, lost_ratio) for seed in range(len(stubs))]
    try:
        for stub, proxy in zip(stubs, proxies, strict=True):
            await proxy.attach(stub)
        yield proxies
    finally:
        for proxy in proxies:
            await proxy.detach()
        context.destroy(linger=0)
