"""A chat stream's bytes as another API's stream (sans-I/O).

Owns the cutting of bytes into events, however they come. Must never hold more than one unfinished event, of at most
MAX_EVENT_BYTES; after an error nothing more is said.
"""

from __future__ import annotations

import msgspec

from worker.prompt.foreign_api import Event, ForeignStream, read_error
from worker.protocol.api_error import ApiError

MAX_EVENT_BYTES = 8 * 1024 * 1024
KEEP_ALIVE = b": keep-alive\n\n"


def event_bytes(event: Event) -> bytes:
    """One named event on the wire."""
    return b"event: %b\ndata: %b\n\n" % (event.name.encode(), msgspec.json.encode(event.data))


class StreamTranslation:
    """feed() takes what an engine sent, or what a relay put between, and gives what the client is to have."""

    def __init__(self, stream: ForeignStream) -> None:
        self._stream = stream
        self._rest = b""
        self._is_error = False
        self._is_over = False

    def feed(self, data: bytes) -> bytes:
        """The translation of everything that is complete by now."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rest = b""
            return self._fail(ApiError(502, "worker_failed", "The engine sent an event without an end."))
        return b"".join([self._line(line.rstrip(b"\r")) for line in lines])

    def _line(self, line: bytes) -> bytes:
        if self._is_over or not line:
            return b""
        if line.startswith(b":"):
            event = self._stream.keep_alive()
            return KEEP_ALIVE if event is None else event_bytes(event)
        field, _, value = line.partition(b":")
        if field == b"event":
            self._is_error = value.strip() == b"error"
        if field != b"data":
            return b""
        value = value.strip()
        if value == b"[DONE]":
            self._is_over = True
            return _joined(self._stream.done())
        return self._data(value)

    def _data(self, value: bytes) -> bytes:
        try:
            chunk = msgspec.json.decode(value)
        except msgspec.DecodeError:
            chunk = None
        if self._is_error or (isinstance(chunk, dict) and chunk.get("error")):
            return self._fail(read_error(500, value))
        if not isinstance(chunk, dict):
            return self._fail(ApiError(502, "worker_failed", "The engine sent an event that is no JSON object."))
        return _joined(self._stream.chunk(chunk))

    def _fail(self, error: ApiError) -> bytes:
        self._is_over = True
        return _joined(self._stream.failed(error))


def _joined(events: list[Event]) -> bytes:
    return b"".join(map(event_bytes, events))
