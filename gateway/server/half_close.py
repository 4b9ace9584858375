"""A client has said all it had to say: it waits for its answer, or it has left. The same bytes arrive either way.

Owns: finding out. A host whose socket is closed answers the next byte with a reset, one that only stopped sending
takes it. So something harmless is sent, and the connection's state is looked at until the answer has ended.
Must never: send what the answer could not hold there: an interim 100 before it, a comment between two events.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 1.0
# HTTP/1.0 has no interim answers. Proxies that speak it close when their own client leaves, so it has left, unless
# the answer begins within this.
UNPROBED_WAIT_S = 0.5
_TCP_CLOSE = 7
CAN_TELL = hasattr(socket, "TCP_INFO")


class HalfClosed:
    """Watches one connection from the client's end of stream on. `left` is called once, when it has left."""

    def __init__(self, transport: asyncio.Transport, *, probe: Callable[[], bool], can_be_probed: Callable[[], bool],
                 left: Callable[[], None]) -> None:
        self._transport = transport
        self._probe = probe
        self._can_be_probed = can_be_probed
        self._left = left
        self._was_probed = False
        self._pause_s = FIRST_LOOK_S
        self._waited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        """The answers have ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if not is_reset(self._transport):
            self._was_probed = self._was_probed or self._probe()
        is_silent = not self._was_probed and self._waited_s >= UNPROBED_WAIT_S and not self._can_be_probed()
        if is_silent or is_reset(self._transport):
            self._timer = None
            self._left()
            return
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)
        self._waited_s += self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_LOOK_S)


def is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other side has refused what was sent. The loop does not tell: it has stopped reading."""
    found = transport.get_extra_info("socket")
    if found is None or transport.is_closing():
        return True
    return bool(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)
