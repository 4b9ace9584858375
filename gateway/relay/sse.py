"""The end of a stream, remembered without parsing the stream (sans-I/O).

Owns: the last bytes of one response, whether they end on an event border, and what they say once it has ended.
Must never: change or delay a byte, or look inside a chunk while the stream runs.
Approximation: usage is found only if it lies within the last `limit_bytes`; OpenAI puts it in the last data event.
"""

from __future__ import annotations

from collections import deque

import msgspec
from msgspec import Struct

KEEPALIVE_COMMENT = b": keep-alive\n\n"
TAIL_LIMIT_BYTES = 64 * 1024
_EVENT_STREAM = "text/event-stream"
_USUAL_END = b"data: [DONE]\n\n"
_USAGE = b'"usage"'
_BORDERS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Usage(Struct, frozen=True, gc=False):
    """Token counts as the worker reported them; `cached_tokens` is None when the engine does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class StreamTail:
    """The last `limit_bytes` of what has passed, at least; at most twice that, beyond a chunk that is larger."""

    def __init__(self, limit_bytes: int = TAIL_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._chunks: deque[bytes] = deque()
        self._held_bytes = 0
        self.total_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Remember one chunk, forgetting the oldest that the limit no longer needs."""
        self._chunks.append(chunk)
        self._held_bytes += len(chunk)
        self.total_bytes += len(chunk)
        if self._held_bytes > 2 * self._limit_bytes:
            while self._held_bytes - len(self._chunks[0]) >= self._limit_bytes:
                self._held_bytes -= len(self._chunks.popleft())

    @property
    def at_event_border(self) -> bool:
        """Whether a comment may be inserted here without tearing an event (true before the first byte)."""
        ending = b""
        for chunk in reversed(self._chunks):
            ending = chunk[-4:] + ending
            if len(ending) >= 4:
                break
        return self.total_bytes == 0 or ending.endswith(_BORDERS)

    def tail(self) -> bytes:
        """The remembered bytes."""
        return b"".join(self._chunks)

    def ended_with_done(self) -> bool:
        """Whether the last line that says anything is `data: [DONE]`; comments and blank lines say nothing."""
        if len(self._chunks) > 1 and self._chunks[-1] == _USUAL_END and self._chunks[-2].endswith(b"\n"):
            return True
        for line in reversed(self.tail().splitlines()):
            if not line or line.startswith(b":"):
                continue
            field, _, value = line.partition(b":")
            return field == b"data" and value.strip() == b"[DONE]"
        return False

    def stream_usage(self) -> Usage | None:
        """The usage of the last data event that has one."""
        tail = self.tail()
        at = tail.rfind(_USAGE)
        while at >= 0:
            begin = max(tail.rfind(b"\n", 0, at), tail.rfind(b"\r", 0, at)) + 1
            line = tail[begin:].splitlines()[0]
            usage = body_usage(line[5:].strip()) if line.startswith(b"data:") else None
            if usage is not None:
                return usage
            at = tail.rfind(_USAGE, 0, begin)
        return None


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Counts(Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Body(Struct, gc=False):
    usage: _Counts | None = None


_body_decoder = msgspec.json.Decoder(_Body, strict=False)


def body_usage(body: bytes) -> Usage | None:
    """The `usage` object of one JSON body or event, or None when there is none or it is not what OpenAI defines."""
    try:
        usage = _body_decoder.decode(body).usage
    except (msgspec.MsgspecError, RecursionError):
        return None
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return Usage(usage.prompt_tokens, usage.completion_tokens or 0, cached)


def is_event_stream(content_type: str) -> bool:
    """Whether a Content-Type is that of an SSE stream; its name is in any case of letters (RFC 9110, 8.3.1)."""
    return content_type.partition(";")[0].strip().lower() == _EVENT_STREAM


def error_event(body: bytes) -> bytes:
    """An SSE `error` event, opened by a blank line in case the stream broke off inside an event."""
    return b"\n\nevent: error\ndata: " + body + b"\n\n"
