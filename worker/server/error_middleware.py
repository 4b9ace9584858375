"""The outermost handler: every outcome that is not a response becomes the OpenAI error object.

Owns the request id of every request (the client's `x-request-id` when it is usable, else a new one) and puts it on
every response. Nothing else leaks: an unexpected exception is a 500 with the request id, its traceback in the log.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARS_MAX = 128
_USABLE_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARS_MAX}}}\Z")
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
_log = get_logger("worker.server.error_middleware")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, run its handler, render what it raises."""
    request_id = _request_id_of(request)
    request[REQUEST_ID] = request_id
    try:
        response = await handler(request)
    except ApiError as error:
        response = render(error)
    except web.HTTPException as error:
        response = render(_from_aiohttp(request, error))
    except ConnectionError:
        raise       # the client left while its answer was written: nobody is there to be told
    except Exception:
        _log.exception("internal_error", request_id=request_id, path=request.path)
        response = render(internal_error(request_id))
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


def render(error: ApiError) -> web.Response:
    """The response for an ApiError."""
    return web.Response(status=error.status, body=orjson.dumps(error.body()), headers=error.headers,
                        content_type="application/json")


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"The request body is larger than {limit_bytes} bytes.")


def internal_error(request_id: str) -> ApiError:
    """Our bug. What it was stands in the log, under the request id."""
    return ApiError(500, "internal_error", f"The worker failed on this request ({request_id}); its log says why.")


def _request_id_of(request: web.Request) -> str:
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _USABLE_REQUEST_ID.match(given) else secrets.token_hex(16)


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals (routing, body size, bad encodings) in our shape."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, "method_not_allowed",
                        f"{request.method} is not allowed on {request.path}; use {allowed}.",
                        headers={"Allow": allowed})
    if error.status == 404:
        return ApiError(404, "not_found", f"There is no {request.path} here.")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "body_too_large", "The request body is larger than this worker's limit.")
    if error.status >= 500:
        return ApiError(error.status, "internal_error", error.reason)
    return ApiError(error.status, "invalid_request", error.reason)
