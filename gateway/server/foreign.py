"""Anthropic's Messages and OpenAI's Responses in front of the chat path: what differs from a chat request.

Owns: the bond between a client's request and the translation of its answer. Must never: route or relay; engines see
chat requests only, and so prefixes are found whichever API they came by.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest

from gateway import errors
from gateway.relay.relay import Write
from gateway.server.request_record import RequestRecord
from worker.prompt.foreign_api import ForeignAnswer, ForeignApi, PromptCount, encoded
from worker.prompt.foreign_stream import StreamTranslation
from worker.prompt.messages_body import COUNT_TOKENS, MESSAGES
from worker.prompt.responses_body import RESPONSES
from worker.protocol.api_error import ApiError

__all__ = ["COUNT_TOKENS", "MESSAGES", "RESPONSES", "Way", "errors_of", "set_way_back", "way_back"]


class Way:
    """One request's way back into the API that it came by."""

    def __init__(self, api: ForeignApi, answer: ForeignAnswer) -> None:
        self._api = api
        self._answer = answer

    def writer(self, write: Write, record: RequestRecord) -> Write:
        """`write`, given a chat stream, writes this API's."""
        prompt = PromptCount(record.prompt_tokens or 0, record.cached_tokens or 0)
        translation = StreamTranslation(self._answer.stream(prompt))

        def translated(data: bytes) -> Awaitable[None] | None:
            events = translation.feed(data)
            return write(events) if events else None

        return translated

    def whole(self, status: int, body: bytes, *, is_complete: bool) -> bytes:
        """A whole answer or an engine's refusal in this API's shape. ApiError 502 for what cannot be read."""
        if status >= 400:
            return orjson.dumps(self._api.error_of(status, body).body())
        if not is_complete:
            raise errors.worker_failed("The answer is too large to be translated; ask for a stream.")
        try:
            answer = self._answer.whole(orjson.loads(body))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
            raise errors.worker_failed("The engine's answer is no chat completion.") from None
        return encoded(answer)


_WAY: web.RequestKey[Way] = web.RequestKey("way_back", Way)


def set_way_back(request: BaseRequest, way: Way) -> None:
    """From now on answers to this request are translated."""
    request[_WAY] = way


def way_back(request: BaseRequest) -> Way | None:
    """None for a request that came by an API of the engines."""
    return request.get(_WAY)


@contextmanager
def errors_of(api: ForeignApi) -> Iterator[None]:
    """Around the handling of a request: whatever is refused is refused in its API's shape."""
    try:
        yield
    except ApiError as error:
        raise api.error(error) from None
