"""ZMTP 3.0, what ZeroMQ's sockets speak over a connection, as far as one who connects needs it (sans-I/O).

Owns: bytes from the other side in, whole messages and bytes for it out. NULL is the only mechanism, as with the event
sockets of every engine. Must never: hold more than MESSAGE_MAX_BYTES, and a read, of what is not whole.
"""

from __future__ import annotations

from collections.abc import Sequence

FRAMES_MAX = 16
MESSAGE_MAX_BYTES = 64 << 20
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES, _GREETING_BYTES = 10, 64
_MECHANISM = b"NULL".ljust(20, b"\0")
_SHORT_MAX = 255
_READY, _ERROR, _PING, _PONG = b"\x05READY", b"\x05ERROR", b"\x04PING", b"\x04PONG"
_TTL_BYTES, _CONTEXT_MAX_BYTES = 2, 16

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM + bytes(32)


class ZmtpError(Exception):
    """This is not the kind of socket that we need, or it breaks the protocol; the message says how."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame on the wire."""
    if len(body) <= _SHORT_MAX:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


def ready(socket_type: bytes) -> bytes:
    """The command by which a side tells what it is."""
    name = b"Socket-Type"
    size = len(socket_type).to_bytes(4, "big")
    return frame(b"%b%c%b%b%b" % (_READY, len(name), name, size, socket_type), _COMMAND)


def encode_message(frames: Sequence[bytes]) -> bytes:
    """A message on the wire."""
    *front, last = frames
    return b"".join([*(frame(part, _MORE) for part in front), frame(last)])


class Peer:
    """One connection, from its first byte on: send GREETING, then whatever taken_output() gives after feed().

    We are a socket of `kind`, the other side has to be one of `others`; `first_words` are for it once it is.
    """

    def __init__(self, kind: bytes, others: Sequence[bytes], first_words: bytes = b"") -> None:
        self.is_ready = False   # the other side has told that it is what we need, and has been given the first words
        self._kind = kind
        self._others = others
        self._first_words = first_words
        self._is_greeted = False
        self._output = b""
        self._held: list[bytes] = []    # what has come of a frame that is not whole
        self._num_held = 0
        self._due = _GREETING_BYTES     # with fewer bytes there is nothing to read
        self._frames: list[bytes] = []  # of a message that is not whole
        self._num_framed = 0

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are whole now, each with its frames. ZmtpError ends the connection."""
        if self._held:
            self._held.append(data)
            self._num_held += len(data)
            if self._num_held < self._due:
                return []
            data = b"".join(self._held)
            self._held.clear()
        messages: list[list[bytes]] = []
        at = 0 if self._is_greeted else self._read_greeting(data)
        if self._is_greeted:
            at = self._read_frames(data, at, messages)
        if at < len(data):
            self._held.append(data[at:])
            self._num_held = len(data) - at
        return messages

    def taken_output(self) -> bytes:
        """What is to be sent now."""
        output, self._output = self._output, b""
        return output

    def _read_greeting(self, data: bytes) -> int:
        """How many bytes it took."""
        if data[0] != GREETING[0] or (len(data) >= _SIGNATURE_BYTES and data[9] != GREETING[9]):
            raise ZmtpError("it does not speak ZMTP")
        if len(data) < _GREETING_BYTES:
            return 0
        if data[10] < GREETING[10]:
            raise ZmtpError(f"it speaks ZMTP {data[10]}, where 3 is needed")
        if data[12:32] != _MECHANISM:
            raise ZmtpError(f"its mechanism is {data[12:32].rstrip(bytes(1))!r}, where NULL is needed")
        self._is_greeted = True
        self._output += ready(self._kind)
        return _GREETING_BYTES

    def _read_frames(self, data: bytes, at: int, messages: list[list[bytes]]) -> int:
        """Take what is whole; how far that goes."""
        end = len(data)
        while True:
            body = at + 9 if at < end and data[at] & _LONG else at + 2
            if body > end:
                self._due = body - at
                return at
            flags = data[at]
            size = int.from_bytes(data[at + 1:body], "big")
            if flags & ~(_MORE | _LONG | _COMMAND) or size + self._num_framed > MESSAGE_MAX_BYTES:
                raise ZmtpError(f"a frame with flags {flags} and {size} bytes")
            if body + size > end:
                self._due = body + size - at
                return at
            at = body + size
            if flags & _COMMAND:
                self._obey(data[body:at])
            else:
                self._take(data[body:at], messages, has_more=bool(flags & _MORE))

    def _take(self, part: bytes, messages: list[list[bytes]], *, has_more: bool) -> None:
        frames = self._frames
        if not self.is_ready:
            raise ZmtpError("a message before READY")
        if len(frames) == FRAMES_MAX:
            raise ZmtpError(f"a message of over {FRAMES_MAX} frames")
        frames.append(part)
        self._num_framed += len(part)
        if not has_more:
            messages.append(frames)
            self._frames, self._num_framed = [], 0

    def _obey(self, command: bytes) -> None:
        if command.startswith(_READY):
            self._check_type(_properties(command[len(_READY):]).get(b"socket-type", b""))
            if not self.is_ready:
                self.is_ready = True
                self._output += self._first_words
        elif command.startswith(_ERROR):
            raise ZmtpError(f"it refuses: {command[len(_ERROR) + 1:].decode('ascii', 'replace')}")
        elif command.startswith(_PING):
            context = command[len(_PING) + _TTL_BYTES:]
            self._output += frame(_PONG + context[:_CONTEXT_MAX_BYTES], _COMMAND)

    def _check_type(self, socket_type: bytes) -> None:
        if socket_type not in self._others:
            raise ZmtpError(f"its socket is a {socket_type.decode('ascii', 'replace') or 'nameless one'}, "
                            f"no {self._others[0].decode()}")


def subscriber(topic: bytes) -> Peer:
    """Who hears what is published about `topic`."""
    return Peer(b"SUB", (b"PUB", b"XPUB"), frame(b"\x01" + topic))


def dealer() -> Peer:
    """Who asks a router, with encode_message(), and hears its answers."""
    return Peer(b"DEALER", (b"ROUTER",))


def _properties(data: bytes) -> dict[bytes, bytes]:
    """By their names in lower case; ZmtpError when they are torn."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        value_at = at + 1 + data[at] + 4
        stop = value_at + int.from_bytes(data[value_at - 4:value_at], "big")
        if stop > len(data) or value_at > len(data):
            raise ZmtpError("its READY is torn")
        found[data[at + 1:value_at - 4].lower()] = data[value_at:stop]
        at = stop
    return found
