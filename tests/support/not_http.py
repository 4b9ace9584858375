"""Requests that are not HTTP, each with a canary where a prompt could stand, sent over a raw socket."""

from __future__ import annotations

import asyncio
import zlib
from typing import NamedTuple

import orjson

CANARY = b"canary-7f3a"
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_BODY = b'{"model":"stub","messages":[{"role":"user","content":"' + CANARY + b'"}]}'
_SIZED = b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
# Framed well, so that such a connection would stay open.
_GZIP, _DEFLATE_CODED = (b"Connection: close\r\nContent-Encoding: " + coding + b"\r\n"
                         for coding in (b"gzip", b"deflate"))
ANSWER_S = 20.0

TOO_LONG = "a header too long"
NOT_HTTP = {
    "a chunked body without chunks": _HEAD + _CHUNKED + _BODY,
    "a chunk size below its data": _HEAD + _CHUNKED + b"5\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "JSON among the headers": _HEAD + _BODY + b"\r\n\r\n",
    "JSON alone": _BODY + b"\r\n\r\n",
    "no gzip": _HEAD + _GZIP + _SIZED,
    "no deflate": _HEAD + _DEFLATE_CODED + _SIZED,
    "no gzip in chunks": _HEAD + _GZIP + _CHUNKED + b"%x\r\n" % len(_BODY) + _BODY
                         + b"\r\n0\r\n\r\n",
    "no Host": b"POST /v1/chat/completions HTTP/1.1\r\n" + _SIZED,
    "a length in words": _HEAD + b"Content-Length: " + CANARY + b"\r\n\r\n" + _BODY,
    "a length and chunks": _HEAD + b"Content-Length: 5\r\n" + _CHUNKED + _BODY,
    "two lengths": _HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + _BODY,
    TOO_LONG: _HEAD + b"X-Long: " + CANARY * 2000 + b"\r\n\r\n",
    "an unknown method": b"BREW /" + CANARY + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "no path": b"GET http://[" + CANARY + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}

_CHUNK = b"%x\r\n" % len(_BODY) + _BODY
_DEFLATE = zlib.compressobj()
_DEFLATED = _DEFLATE.compress(_BODY) + _DEFLATE.flush(zlib.Z_SYNC_FLUSH)
# (what comes first, what comes once that was read): the end of a chunk and what is wrong arrive in one piece.
WRONG_AFTER_A_CHUNK = {
    "a bare LF in the trailers": (_HEAD + _CHUNKED + _CHUNK, b"\r\n0\r\nX: " + CANARY + b"\n\r\n"),
    "no chunk size": (_HEAD + _CHUNKED + _CHUNK, b"\r\n" + CANARY + b"\r\n"),
    "no deflate": (_HEAD + _DEFLATE_CODED + _CHUNKED + b"%x\r\n" % len(_DEFLATED) + _DEFLATED,
                   b"\r\n%x\r\n" % (len(CANARY) + 1) + b"\xff" + CANARY + b"\r\n0\r\n\r\n"),
}


class RawAnswer(NamedTuple):
    """What came back before the server closed the connection."""

    status_line: bytes
    head: bytes
    body: bytes


async def send_raw(port: int, request: bytes, *, pause_s: float = 0.0, pause_at: int | None = None) -> RawAnswer:
    """Send, with a pause where one is asked for (before the body if not told), and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if pause_at is None:
            pause_at = request.find(b"\r\n\r\n") + 4 if pause_s else len(request)
        writer.write(request[:pause_at])
        await asyncio.sleep(pause_s)
        writer.write(request[pause_at:])
        async with asyncio.timeout(ANSWER_S):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return RawAnswer(head.partition(b"\r\n")[0], head, body)


def check_refused(answer: RawAnswer, name: str = "") -> None:
    """400, or 431 for what is too long, with the OpenAI error object, alone and in words that quote nothing."""
    is_long = name == TOO_LONG
    assert answer.status_line.startswith(b"HTTP/1.1 431 " if is_long else b"HTTP/1.1 400 Bad Request")
    error = orjson.loads(answer.body)["error"]
    code = "head_too_large" if is_long else "invalid_request"
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, None)
    assert CANARY not in answer.head + answer.body
    assert b"content-type: application/json" in answer.head.lower()
    assert b"x-request-id: " in answer.head.lower()
