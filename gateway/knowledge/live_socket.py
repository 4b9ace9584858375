"""The subscription to one worker's live events, read by the event loop itself.

Owns: the SUB socket's place in the loop. zmq.asyncio would do, but a message that comes alone costs several times as
much there as what is done with it.
Must never: parse a message.
"""

from __future__ import annotations

import asyncio

from zmq.constants import Flag, SocketOption
from zmq.error import Again
from zmq.sugar.socket import Socket


class LiveSocket:
    """Around a connected plain socket, whose owner closes it, after this. One reader at a time."""

    def __init__(self, socket: Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.getsockopt(SocketOption.FD)
        self._waiting: asyncio.Future[None] | None = None
        # The descriptor tells of a change once: nothing is there only between an empty read and the next change.
        self._is_empty = False
        self._was_full = False
        self._loop.add_reader(self._descriptor, self._changed)

    def close(self) -> None:
        """Leave the loop."""
        self._loop.remove_reader(self._descriptor)

    async def receive(self, num_max: int, timeout_s: float) -> list[list[bytes]]:
        """At least one message, and up to `num_max` of those that are there already; none after so long a silence.

        However many there are, others on the loop get their turn in between.
        """
        if self._was_full:
            await asyncio.sleep(0)
        deadline = self._loop.time() + timeout_s
        while not (messages := self._read(num_max)):
            if self._loop.time() >= deadline:
                break
            await self._await_change(deadline)
        self._was_full = len(messages) == num_max
        return messages

    def _read(self, num_max: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        try:
            while not self._is_empty and len(messages) < num_max:
                messages.append(self._socket.recv_multipart(Flag.DONTWAIT))
        except Again:
            self._is_empty = True
        return messages

    async def _await_change(self, deadline: float) -> None:
        self._waiting = waiting = self._loop.create_future()
        timer = self._loop.call_at(deadline, _wake, waiting)
        try:
            await waiting
        finally:
            self._waiting = None
            timer.cancel()

    def _changed(self) -> None:
        self._is_empty = False
        if self._waiting is not None:
            _wake(self._waiting)
        else:
            # Nobody reads now: looking keeps the descriptor from telling of the same change in every turn.
            self._socket.getsockopt(SocketOption.EVENTS)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
