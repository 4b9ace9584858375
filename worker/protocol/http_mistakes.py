"""What aiohttp answers and logs by itself, before or after any handler: for both processes, without prompt text.

Owns the replies to requests that are not HTTP (bad chunks, bad headers, bad encodings): the OpenAI error object in
fixed words. Must never: put a client's bytes, or a traceback that quotes them, into an answer or the log.
"""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo
from aiohttp.web_request import BaseRequest

from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.logs import get_logger

MAX_HEAD_BYTES = 65_536
SERVER = "headstart"  # aiohttp would tell which Python, and which release of itself
_NOT_HTTP = ("The request is not well-formed HTTP/1.1; "
             "check its request line, its headers and how its body is framed.")
_TOO_LARGE = (f"The request's head is too large: 8,190 bytes a line, 128 headers and {MAX_HEAD_BYTES:,} bytes in all "
              "are the most; send fewer or shorter headers, or a shorter path.")
# A client's doing, each with a message that may quote what was sent.
_MISTAKES = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
_log = get_logger("worker.protocol.http_mistakes")


class HeadTooLarge(HttpProcessingError):
    """Each line is short enough, and all of them together are not."""

    code = 431


class PrivateServer(web.Server):
    """aiohttp's low-level server with connections that keep what clients sent to themselves."""

    def __call__(self) -> web.RequestHandler:
        return PrivateConnection(self, loop=self._loop, **self._kwargs)


class PrivateAppRunner(web.AppRunner):
    """web.AppRunner on a PrivateServer."""

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return PrivateServer(plain.request_handler, request_factory=plain.request_factory,
                             handler_cancellation=plain.handler_cancellation, **plain._kwargs)


class PrivateConnection(web.RequestHandler):
    """One client's connection; see PrivateServer. Bodies are read as they came: body_encoding.py is for the rest."""

    __slots__ = ()

    def __init__(self, manager: web.Server, **kw: Any) -> None:
        super().__init__(manager, auto_decompress=False, **kw)

    def data_received(self, data: bytes) -> None:
        if self._is_lost():
            return  # each piece would be another mistake in the queue, until it is full and the end is never read
        super().data_received(data)
        if self._is_lost():
            self._end_open_bodies()     # nothing more can come, and aiohttp would let their readers wait

    def refuse_head(self) -> None:
        """Answer what has been read of a head, or the last whole one, by 431, and read no more."""
        self._request_count += 1
        self._messages.append((_ErrInfo(HeadTooLarge.code, HeadTooLarge(), ""), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_lost(self) -> bool:
        """Whether what came last was not HTTP."""
        return bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)

    def _end_open_bodies(self) -> None:
        reading = self._current_request
        for body in [payload for _, payload in self._messages] + ([] if reading is None else [reading.content]):
            if not body.is_eof() and body.exception() is None:
                body.set_exception(web.RequestPayloadError())
                self._tell_again(body)

    def _tell_again(self, body: StreamReader) -> None:
        """A reader woken by the end of a chunk, in the same turn of the loop, misses its body's failure and waits on.

        aiohttp looks for one before the first wait alone. What is called here runs once that reader waits again.
        """
        failure = body.exception()
        if isinstance(failure, BaseException):
            self._loop.call_soon(body.set_exception, failure)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, _MISTAKES):
            _log.debug("not_http", kind=type(error).__name__)
        else:
            super().log_exception(*args, **kw)

    def handle_error(self, request: BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        self.log_exception("Error handling request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("The answer has begun: nothing can be said any more.")
        if status < 500:
            error = head_too_large() if _is_too_large(exc) else invalid_request(_NOT_HTTP, None)
            request._version = HttpVersion11    # what cannot be read has none, and aiohttp would say 1.0
        else:
            error = ApiError(status, "internal_error", "The server failed on this request.")
        return _response(error)

    async def finish_response(self, request: BaseRequest, resp: web.StreamResponse,
                              start_time: float | None) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):     # raised beside every handler of ours: an Expect nobody knows
            resp = _response(ApiError(resp.status, "invalid_request", f"The server cannot do this: {resp.reason}."))
        if isinstance(resp, web.Response):
            resp.headers.setdefault(hdrs.SERVER, SERVER)
        return await super().finish_response(request, resp, start_time)


def head_too_large() -> ApiError:
    """431: a line, the number of headers, or the whole is beyond its limit."""
    return ApiError(HeadTooLarge.code, "head_too_large", _TOO_LARGE)


def _is_too_large(exc: BaseException | None) -> bool:
    if isinstance(exc, HttpProcessingError) and exc.message.startswith("Too many headers"):
        return True     # which to aiohttp is a bad message like any other
    return isinstance(exc, (HeadTooLarge, LineTooLong))


def _response(error: ApiError) -> web.Response:
    response = web.Response(status=error.status, body=orjson.dumps(error.body()), content_type="application/json",
                            headers={"x-request-id": secrets.token_hex(16)})
    response.force_close()
    return response
