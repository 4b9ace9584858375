"""What aiohttp's parser lets pass and RFC 9110 and 9112 do not, or leave to the server: refused before any route.

Owns: heads that another reader might understand in another way. Must never: look at a body.
"""

from __future__ import annotations

import re

from aiohttp import hdrs
from aiohttp.http import HttpVersion, HttpVersion10, HttpVersion11
from multidict import CIMultiDictProxy

from gateway.server.client_headers import DEADLINE_HEADER, MIGRATION_HEADER, REQUEST_ID_HEADER
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.body_encoding import ENCODINGS, ENCODINGS_TEXT

_HOST = re.compile(r"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::\d{0,5})?\Z", re.ASCII)


class UnclearHead(ApiError):
    """The connection ends with this answer."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request") -> None:
        super().__init__(status, code, message)


# Of these a second one could only contradict the first. Others of that kind are refused by aiohttp.
_ONCE = (hdrs.CONTENT_ENCODING, hdrs.EXPECT, REQUEST_ID_HEADER, DEADLINE_HEADER, MIGRATION_HEADER)


def check_head(version: HttpVersion, headers: CIMultiDictProxy[str]) -> None:
    """UnclearHead for a version, Host, coding or expectation that is not one of those served here."""
    for name in _ONCE:
        if len(headers.getall(name, ())) > 1:
            raise invalid_request("The header should be there once at the most.", name)
    if version not in (HttpVersion11, HttpVersion10):
        raise UnclearHead(505, "HTTP/1.1 and HTTP/1.0 are served here.", code="version_not_supported")
    if hdrs.TRANSFER_ENCODING in headers:
        codings = headers.getall(hdrs.TRANSFER_ENCODING)
        if len(codings) > 1 or codings[0].strip().lower() != "chunked" or version == HttpVersion10:
            raise UnclearHead(400, "`chunked` is the only Transfer-Encoding that is accepted, and in HTTP/1.1 only.")
    if headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() not in ENCODINGS:
        raise UnclearHead(415, ENCODINGS_TEXT, code="encoding_not_supported")
    if not _HOST.match(headers.get(hdrs.HOST, "")):
        raise UnclearHead(400, "The Host header should be a name or an address, with or without a port.")
    if hdrs.EXPECT in headers and headers[hdrs.EXPECT].strip().lower() != "100-continue":
        raise UnclearHead(417, "`100-continue` is the only expectation that can be met.", code="expectation_failed")
