"""An HTTP/1.1 response out of the bytes of a connection (RFC 9112), sans-I/O.

Owns: where the head ends, how long the body is, what is framing and what is body, and whether the connection may
serve another request after it. However the bytes are cut on their way, the outcome is the same.
Must never: guess. What is ambiguous or malformed is a failure: a worker that frames badly is not reinterpreted.
Not supported, since no request of ours asks for it: upgrades, transfer codings other than chunked.
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

MAX_HEAD_BYTES = 32 * 1024  # of one head, and of the trailers
MAX_HEADERS = 256
MAX_CHUNK_LINE_BYTES = 4096  # extensions included
MAX_INFORMATIONAL = 16  # 1xx heads before the final one

_VALUE = rb"[\t\x20-\x7e\x80-\xff]*"
_FIELD = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:" + _VALUE
_START = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NO_CONTROLS = bytes({*range(0x20, 0x7f), *range(0x80, 0x100), 0x09})  # what a value may hold
HEADS_REMEMBERED = 256  # start lines and names of headers, which are few
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;" + _VALUE + rb")?")
_TRAILER = re.compile(_FIELD)
_BEGINNING = b"HTTP/1."
_NO_BODY = (204, 304)
# A stream's usual chunks arrive one by one, whole, and are no longer than this.
FRAMED_BYTES_MAX = 2047
CHUNK_SIZES = {text % size: size for size in range(1, FRAMED_BYTES_MAX + 1) for text in (b"%x", b"%X")}
LENGTH_DIGITS_MAX = 18


class ResponseHead(Struct, frozen=True, gc=False):
    """Names in lower case; values of a name that came more than once are joined with commas."""

    status: int
    headers: dict[str, str]


class _Malformed(Exception):
    pass


class ResponseParser:
    """feed() what arrives, eof() when the worker has ended its side. `failure` says what is wrong, once it is."""

    __slots__ = ("_ends_chunk", "_is_chunked", "_is_head_request", "_keeps_alive", "_left",
                 "_num_informational", "_num_trailer_bytes", "_pending", "failure", "has_leftover", "head",
                 "is_at_chunk", "is_complete")

    def __init__(self, *, is_head: bool = False) -> None:
        self._is_head_request = is_head
        self.head: ResponseHead | None = None
        self.failure: str | None = None
        self.is_complete = False
        self.has_leftover = False
        self._keeps_alive = False
        self._num_informational = 0
        self._pending = b""  # the beginning of a head, a chunk line or a trailer; never body
        self._left: int | None = 0  # body bytes to come, of this chunk if chunked; None: until the connection ends
        self._is_chunked = False
        self.is_at_chunk = False  # the next byte begins a chunk's size
        self._ends_chunk = False  # the CRLF after a chunk's data is due
        self._num_trailer_bytes: int | None = None  # None until the last chunk

    @property
    def is_reusable(self) -> bool:
        """Whether the connection may carry another request: the message ended by itself, and nothing followed."""
        return self.is_complete and self._keeps_alive and not self.has_leftover

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`, without framing. What follows the end of the message is only noted."""
        if self.is_at_chunk:
            end = data.find(b"\r\n")
            if CHUNK_SIZES.get(data[:end]) == len(data) - end - 4 and data.endswith(b"\r\n"):
                return data[end + 2:-2]
        if self.is_complete or self.failure is not None:
            self.has_leftover = self.has_leftover or bool(data)
            return b""
        self.is_at_chunk = False
        body: list[bytes] = []
        try:
            if self.head is None:
                data = self._take_heads(data)
            if self.head is not None:
                self._take_body(data, body)
        except _Malformed as malformed:
            self.failure = str(malformed)
        return body[0] if len(body) == 1 else b"".join(body)

    def eof(self) -> None:
        """The worker sends nothing more. A failure, unless that is how this message ends."""
        if self.is_complete or self.failure is not None:
            return
        if self.head is None:
            self.failure = "closed inside the response head" if self._pending else "closed before any response"
        elif self._left is None:
            self.is_complete = True
        else:
            self.failure = "closed inside the response body"

    # ---- head ----------------------------------------------------------------------------------------------------

    def _take_heads(self, data: bytes) -> bytes:
        """Heads up to the final one; what follows it. Incomplete ones wait in _pending."""
        data = self._pending + data
        self._pending = b""
        while True:
            if data[:len(_BEGINNING)] != _BEGINNING[:len(data)]:
                raise _Malformed("not an HTTP/1 response")
            end = data.find(b"\r\n\r\n")
            if (end + 4 if end >= 0 else len(data)) > MAX_HEAD_BYTES:
                raise _Malformed(f"a response head of more than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                self._pending = data
                return b""
            head, is_http_11 = _parse_head(data[:end])
            data = data[end + 4:]
            if head.status >= 200:
                self.head = head
                self._settle_framing(head, is_http_11)
                return data
            self._pass_informational(head.status)

    def _pass_informational(self, status: int) -> None:
        self._num_informational += 1
        if status == 101 or self._num_informational > MAX_INFORMATIONAL:
            raise _Malformed("an upgrade that nobody asked for" if status == 101 else "endless 1xx responses")

    def _settle_framing(self, head: ResponseHead, is_http_11: bool) -> None:
        """RFC 9112 section 6.3, refusing what it merely allows to repair."""
        headers = head.headers
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        options = headers.get("connection")
        self._keeps_alive = is_http_11 and (options is None or "close" not in _tokens(options))
        if coding is not None:
            if length is not None:
                raise _Malformed("both Transfer-Encoding and Content-Length")
            if coding.lower() != "chunked" or not is_http_11:
                raise _Malformed(f"Transfer-Encoding {coding[:40]!r} in HTTP/1.{int(is_http_11)}")
        if length is not None and not (length.isascii() and length.isdigit() and len(length) <= LENGTH_DIGITS_MAX):
            raise _Malformed(f"Content-Length {length[:40]!r}")
        if self._is_head_request or head.status in _NO_BODY:
            self.is_complete = True
        elif coding is not None:
            self._is_chunked = True
        elif length is not None:
            self._left = int(length)
            self.is_complete = self._left == 0
        else:
            self._left, self._keeps_alive = None, False

    # ---- body ----------------------------------------------------------------------------------------------------

    def _take_body(self, data: bytes, body: list[bytes]) -> None:
        if self.is_complete:
            self.has_leftover = bool(data)
        elif self._is_chunked:
            self._take_chunks(self._pending + data if self._pending else data, body)
        elif self._left is None:
            body.append(data)
        else:
            body.append(data[:self._left])
            self.has_leftover = len(data) > self._left
            self._left -= len(body[0])
            self.is_complete = self._left == 0

    def _take_chunks(self, data: bytes, body: list[bytes]) -> None:
        at, size = 0, len(data)
        self._pending = b""
        while at < size and not self.is_complete:
            if self._left:
                body.append(data[at:at + self._left])
                at += len(body[-1])
                self._left -= len(body[-1])
                self._ends_chunk = self._left == 0
            elif self._ends_chunk:
                if not b"\r\n".startswith(data[at:at + 2]):
                    raise _Malformed("a chunk longer than it said")
                if at + 2 > size:
                    break
                at += 2
                self._ends_chunk = False
            else:
                end = self._take_line(data, at)
                if end is None:
                    break
                at = end
        if self.is_complete:
            self.has_leftover = at < size
        else:
            self._pending = data[at:]
            is_inside = self._pending or self._left or self._ends_chunk
            self.is_at_chunk = not is_inside and self._num_trailer_bytes is None

    def _take_line(self, data: bytes, at: int) -> int | None:
        """A chunk's size or a trailer: where the line ends, or None while it has not ended."""
        end = data.find(b"\r\n", at)
        num_bytes = (end + 2 if end >= 0 else len(data)) - at
        if self._num_trailer_bytes is None:
            if num_bytes > MAX_CHUNK_LINE_BYTES:
                raise _Malformed(f"a chunk line of more than {MAX_CHUNK_LINE_BYTES} bytes")
        elif self._num_trailer_bytes + num_bytes > MAX_HEAD_BYTES:
            raise _Malformed(f"trailers of more than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return None
        if self._num_trailer_bytes is None:
            self._take_size(data[at:end])
        else:
            self._num_trailer_bytes += num_bytes
            self._take_trailer(data[at:end])
        return end + 2

    def _take_size(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise _Malformed(f"a chunk line {line[:40]!r}")
        self._left = int(match[1], 16)
        if self._left == 0:
            self._num_trailer_bytes = 0

    def _take_trailer(self, line: bytes) -> None:
        """Trailers are checked and dropped: nothing of ours reads one."""
        if not line:
            self.is_complete = True
        elif _TRAILER.fullmatch(line) is None:
            raise _Malformed(f"a trailer {line[:40]!r}")


def _parse_head(raw: bytes) -> tuple[ResponseHead, bool]:
    start, *lines = raw.decode("latin-1").split("\r\n")
    known = _start_line(start)
    # Beside what values may hold there is nothing but the line breaks between the lines.
    if known is None or raw.translate(None, _NO_CONTROLS) != b"\r\n" * len(lines):
        raise _Malformed(f"a malformed response head: {raw[:80]!r}")
    if len(lines) > MAX_HEADERS:
        raise _Malformed(f"more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        lower = _name_of_header(name)
        if not lower or not colon:
            raise _Malformed(f"a malformed response head: {raw[:80]!r}")
        value = value.strip(" \t")
        headers[lower] = f"{headers[lower]}, {value}" if lower in headers else value
    return ResponseHead(known[0], headers), known[1]


@lru_cache(HEADS_REMEMBERED)
def _start_line(line: str) -> tuple[int, bool] | None:
    """The status, and whether it is HTTP/1.1."""
    match = _START.fullmatch(line)
    return None if match is None else (int(match[2]), match[1] == "1")


@lru_cache(HEADS_REMEMBERED)
def _name_of_header(name: str) -> str | None:
    """In lower case; None for what cannot be one."""
    return name.lower() if _NAME.fullmatch(name) else None


def _tokens(value: str) -> list[str]:
    return [token.strip(" \t").lower() for token in value.split(",")]
