"""Server-sent events: bytes of one event, and the response they are written to.

Owns the framing and the headers of a stream. Never decides what is in an event, and never ends a stream with
`data: [DONE]` unless told that it is complete: a stream without it is an error to the client (contract section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import orjson
from aiohttp import web

from worker.prompt.foreign_api import ForeignAnswer, ForeignStream, Json, PromptCount
from worker.prompt.foreign_stream import event_bytes
from worker.protocol.api_error import ApiError

DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx and its relatives would otherwise gather the tokens into buffers.
    "X-Accel-Buffering": "no",
}


def event(payload: object) -> bytes:
    """One `data:` event. orjson never emits a newline, so one line is always enough."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class Wire(Protocol):
    """How one stream's chunks are written."""

    def chunks(self, chunks: Sequence[Json], cached_tokens: int) -> bytes:
        """Chat or completion chunks; b"" when they say nothing. `cached_tokens` counts with the first."""
        ...

    def done(self) -> bytes:
        """The end of a stream that is complete."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The end of one that is not."""
        ...


class PlainWire:
    """As OpenAI streams chat and completions."""

    def chunks(self, chunks: Sequence[Json], cached_tokens: int) -> bytes:
        """See Wire."""
        return b"".join(map(event, chunks))

    def done(self) -> bytes:
        """See Wire."""
        return DONE

    def failed(self, error: ApiError) -> bytes:
        """See Wire."""
        return event(error.body())


class ForeignWire:
    """Chat chunks in another API's events."""

    def __init__(self, answer: ForeignAnswer, *, prompt_tokens: int) -> None:
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._begun: ForeignStream | None = None

    def chunks(self, chunks: Sequence[Json], cached_tokens: int) -> bytes:
        """See Wire."""
        if self._begun is None:
            self._begun = self._answer.stream(PromptCount(self._prompt_tokens, cached_tokens))
        return b"".join(event_bytes(told) for chunk in chunks for told in self._begun.chunk(chunk))

    def done(self) -> bytes:
        """See Wire."""
        return b"".join(map(event_bytes, self._stream.done()))

    def failed(self, error: ApiError) -> bytes:
        """See Wire."""
        return b"".join(map(event_bytes, self._stream.failed(error)))

    @property
    def _stream(self) -> ForeignStream:
        return self._begun or self._answer.stream(PromptCount(self._prompt_tokens))


async def open_stream(request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send the status line and headers of a stream; from here on errors can only be events."""
    response = web.StreamResponse(headers={**_STREAM_HEADERS, **headers})
    await response.prepare(request)
    return response
