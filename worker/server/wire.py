"""How one stream's chunks become bytes: as OpenAI's, with its tokens told to a gateway, or in another API's events.

Owns the choice between them and nothing of what the chunks say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.prompt.foreign_api import ForeignStream, Json, PromptCount
from worker.prompt.foreign_stream import event_bytes
from worker.protocol.api_error import ApiError
from worker.protocol.told_tokens import encode_told
from worker.server.generation import ChoiceDelta, Generation
from worker.server.intake import Admission
from worker.server.sse import DONE, event


class Wire(Protocol):
    """The bytes of one stream, in order."""

    def told(self, delta: ChoiceDelta, chunks: Sequence[Json]) -> bytes:
        """A delta by its chunks; b"" when it says nothing."""
        ...

    def done(self, ending: Sequence[Json]) -> bytes:
        """The end of a stream that is complete, behind its last chunks."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The end of one that is not."""
        ...


def wire_of(admission: Admission, generation: Generation) -> Wire:
    """The one that a request asked for. To be made when the first delta is there."""
    if admission.foreign is not None:
        account = generation.account()
        return ForeignWire(admission.foreign.stream(PromptCount(account.prompt_tokens, account.cached_tokens)))
    return ToldWire() if admission.tells_token_ids else PlainWire()


class PlainWire:
    """As OpenAI streams chat and completions."""

    def told(self, delta: ChoiceDelta, chunks: Sequence[Json]) -> bytes:
        """See Wire."""
        return b"".join(map(event, chunks))

    def done(self, ending: Sequence[Json]) -> bytes:
        """See Wire."""
        return b"".join(map(event, ending)) + DONE

    def failed(self, error: ApiError) -> bytes:
        """See Wire."""
        return event(error.body())


class ToldWire(PlainWire):
    """The same with each delta's tokens told first, also where they have no chunk."""

    def told(self, delta: ChoiceDelta, chunks: Sequence[Json]) -> bytes:
        """See Wire."""
        return encode_told(delta.choice, len(chunks), delta.token_ids) + super().told(delta, chunks)


class ForeignWire:
    """Chat chunks in another API's events."""

    def __init__(self, stream: ForeignStream) -> None:
        self._stream = stream

    def told(self, delta: ChoiceDelta, chunks: Sequence[Json]) -> bytes:
        """See Wire."""
        return self._written(chunks)

    def done(self, ending: Sequence[Json]) -> bytes:
        """See Wire."""
        return self._written(ending) + b"".join(map(event_bytes, self._stream.done()))

    def failed(self, error: ApiError) -> bytes:
        """See Wire."""
        return b"".join(map(event_bytes, self._stream.failed(error)))

    def _written(self, chunks: Sequence[Json]) -> bytes:
        return b"".join(event_bytes(told) for chunk in chunks for told in self._stream.chunk(chunk))
