"""HTTP around the handlers, on aiohttp's low-level server: who answers, how bodies are read, how errors appear.

Owns: the outermost handler: every outcome becomes a response with an `x-request-id`, and every refusal the OpenAI
error object. Must never: know what a route does.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import orjson
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter
from aiohttp.web_request import BaseRequest

from gateway import errors
from gateway.relay.relay import ClientLeft
from gateway.server.client_headers import REQUEST_ID_HEADER
from gateway.server.strict_head import UnclearHead, check_head
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.body_encoding import TORN_TEXT, BadlyEncoded, GrownTooLarge, decoded
from worker.protocol.logs import get_logger

REQUEST_ID_MAX_CHARS = 128
REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
BODY_TIMEOUT_S = 60.0
CLIENT_CLOSED_REQUEST = 499
_USABLE_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_MAX_CHARS}}}\Z")
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:\s*,\s*[\w!#$%&'*+.^`|~-]+){0,63}\Z", re.ASCII)
_USUAL_HEADERS = "Authorization, Content-Type, x-api-key, x-request-id, x-request-deadline-ms"
_log = get_logger(__name__)

Handler = Callable[[BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Served:
    """One route. `is_prefix`: every path that begins so and goes on. `is_offered`: it does more than say why not."""

    method: str
    path: str
    is_prefix: bool = False
    is_offered: bool = True


class Routes:
    """Exact paths, and prefixes whose rest names a resource. `root_path` is what a proxy in front did not strip."""

    def __init__(self, *, root_path: str = "", cors_origins: tuple[str, ...] = ()) -> None:
        self.root_path = root_path.rstrip("/")
        self._cors_origins = cors_origins
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: list[tuple[str, str, str, Handler]] = []
        self._not_offered: set[str] = set()
        self.is_closing: Callable[[], bool] = lambda: False

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Serve `path` by `handler`."""
        self._exact.setdefault(path, {})[method] = handler

    def add_prefix(self, method: str, prefix: str, handler: Handler, *, suffix: str = "") -> None:
        """Serve every path that begins so, goes on, and ends in `suffix`."""
        self._prefixes.append((method, prefix, suffix, handler))

    def add_refusal(self, method: str, path: str, handler: Handler) -> None:
        """Answer `path` with a clear word on why it is not served; the document leaves it out."""
        self.add(method, path, handler)
        self._not_offered.add(path)

    def served(self) -> Iterator[Served]:
        """Every route, for the document."""
        for path, handlers in self._exact.items():
            for method in handlers:
                yield Served(method, path, is_offered=path not in self._not_offered)
        for method, prefix, suffix, _ in self._prefixes:
            yield Served(method, f"{prefix}*{suffix}" if suffix else prefix, is_prefix=True)

    def path_of(self, request: BaseRequest) -> str:
        """The request's path as the routes know it."""
        return request.path.removeprefix(self.root_path) if self.root_path else request.path

    async def __call__(self, request: BaseRequest) -> web.StreamResponse:
        """The outermost handler."""
        request_id = request[REQUEST_ID_KEY] = usable_request_id(request.headers) or new_request_id()
        try:
            response = await self._answer(request)
        except ApiError as error:
            response = error_response(error)
            if isinstance(error, UnclearHead) or error.status in (408, 413):
                response.force_close()  # where the next request begins is anybody's guess, or far away
        except ClientLeft as left:
            _cut(request, str(left), left)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("internal_error", request_id=request_id, path=request.path)
            response = error_response(errors.internal_error(request_id))
        if not response.prepared:
            if _has_begun(request.writer):
                _cut(request, "an answer had begun, and no other may stand inside it")
            response.headers.update(self.common_headers(request))
            if self.is_closing():
                response.force_close()
        return response

    def common_headers(self, request: BaseRequest) -> dict[str, str]:
        """What every response carries."""
        return {REQUEST_ID_HEADER: request_id_of(request), **self.cors_headers(request.headers)}

    def cors_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What a browser's page needs, to be allowed to read the answer, and what a cache between must know."""
        if not self._cors_origins:
            return {}
        origin = headers.get("Origin")
        if origin is None or (origin not in self._cors_origins and "*" not in self._cors_origins):
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin",
                "Access-Control-Expose-Headers": "x-request-id, x-headstart-worker, x-headstart-matched-tokens"}

    async def _answer(self, request: BaseRequest) -> web.StreamResponse:
        check_head(request.version, request.headers)
        if request.method == "OPTIONS" and self._cors_origins and "Origin" in request.headers:
            # Browsers' clients send headers of their own making; none of them can do harm here.
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            return web.Response(status=204, headers={
                "Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Max-Age": "600",
                "Access-Control-Allow-Headers": wanted if _HEADER_NAMES.match(wanted) else _USUAL_HEADERS})
        return await self._find(request)(request)

    def _find(self, request: BaseRequest) -> Handler:
        path, method = self.path_of(request), request.method
        handlers = self._exact.get(path, {})
        if method in handlers:
            return handlers[method]
        handlers = dict(handlers)
        for prefix_method, prefix, suffix, handler in self._prefixes:
            if len(path) > len(prefix) + len(suffix) and path.startswith(prefix) and path.endswith(suffix):
                handlers.setdefault(prefix_method, handler)
        if not handlers:
            raise errors.unknown_path(method, path)
        wanted = "GET" if method == "HEAD" and "HEAD" not in handlers else method
        if wanted not in handlers:
            raise errors.method_not_allowed(method, path, handlers)
        return handlers[wanted]


def _has_begun(writer: AbstractStreamWriter) -> bool:
    """Whether a head has gone out, or has settled how the body is framed."""
    return writer.output_size > 0 or (isinstance(writer, StreamWriter) and writer.chunked)


def _cut(request: BaseRequest, why: str, cause: Exception | None = None) -> NoReturn:
    """Drop the connection: the client sees that its answer is torn. aiohttp says nothing more then."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError(why) from cause


def error_response(error: ApiError) -> web.Response:
    """The OpenAI error object."""
    return json_response(error.body(), status=error.status, headers=error.headers)


def json_response(payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON body."""
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json",
                        headers=dict(headers or {}))


def set_request_id(request: BaseRequest, request_id: str) -> None:
    """It had one before it came to its handler."""
    request[REQUEST_ID_KEY] = request_id


def request_id_of(request: BaseRequest) -> str:
    """The id that the outermost handler gave this request."""
    return request[REQUEST_ID_KEY]


async def read_body(request: BaseRequest, limit_bytes: int) -> bytes:
    """The whole body; ApiError 413 once it is known to be too large, 408 when it takes too long, 400 when torn."""
    body = await _read_as_it_came(request, limit_bytes)
    encoding = request.headers.get(hdrs.CONTENT_ENCODING)
    if encoding is None:
        return body
    try:
        return await decoded(body, encoding, limit_bytes)
    except GrownTooLarge:
        raise errors.body_too_large(limit_bytes) from None
    except BadlyEncoded:
        raise invalid_request(TORN_TEXT, None) from None


async def _read_as_it_came(request: BaseRequest, limit_bytes: int) -> bytes:
    if (request.content_length or 0) > limit_bytes:
        raise errors.body_too_large(limit_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue":
        _send_continue(request)
    if request.content.is_eof() and (request.content_length or 0) > 0:  # it came with its head, as most do
        return request.content.read_nowait()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limit_bytes:
                    raise errors.body_too_large(limit_bytes)
    except TimeoutError:
        raise errors.body_too_slow(BODY_TIMEOUT_S) from None
    except web.RequestPayloadError:
        raise invalid_request(TORN_TEXT, None) from None
    return bytes(body)


def _send_continue(request: BaseRequest) -> None:
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def usable_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's own id, if it may stand in our log."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _USABLE_REQUEST_ID.match(given) else None


def new_request_id() -> str:
    """One that nobody else has; it is no secret."""
    return f"{random.getrandbits(128):032x}"
