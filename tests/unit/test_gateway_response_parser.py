"""The response parser, case by case: RFC 9112, and where we are stricter than it allows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gateway.relay import response_parser
from gateway.relay.response_parser import ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Good:
    name: str
    data: bytes
    body: bytes = b""
    status: int = 200
    reusable: bool = True
    is_head: bool = False
    by_close: bool = False


GOOD = [
    Good("a length", OK + b"Content-Length: 2\r\n\r\nhi", b"hi"),
    Good("a length of 0", OK + b"Content-Length: 0\r\n\r\n"),
    Good("spaces around a value", OK + b"Content-Length: \t 2 \t\r\n\r\nhi", b"hi"),
    Good("no reason phrase", b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n"),
    Good("an empty reason phrase", b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n"),
    Good("a reason in Latin letters", b"HTTP/1.1 200 na\xefve\r\nContent-Length: 0\r\n\r\n"),
    Good("chunks", CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", b"hi"),
    Good("chunks with leading zeros and capitals", CHUNKED + b"00A\r\n0123456789\r\n000\r\n\r\n", b"0123456789"),
    Good("chunked, shouted", OK + b"TRANSFER-ENCODING: Chunked\r\n\r\n0\r\n\r\n"),
    Good("a chunk that holds framing", CHUNKED + b"5\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n"),
    Good("asked to close", OK + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\nhi", b"hi", reusable=False),
    Good("two Connection headers", OK + b"Connection: x\r\nconnection: close\r\nContent-Length: 0\r\n\r\n",
         reusable=False),
    Good("HTTP/1.0 by close", b"HTTP/1.0 200 OK\r\n\r\nhi", b"hi", by_close=True, reusable=False),
    Good("HTTP/1.0 by length", b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nhi", b"hi",
         reusable=False),
    Good("HTTP/1.1 by close", OK + b"\r\nhi", b"hi", by_close=True, reusable=False),
    Good("204 has no body", b"HTTP/1.1 204 No Content\r\n\r\n", status=204),
    Good("304 has no body, whatever its length says", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
         status=304),
    Good("HEAD has no body", OK + b"Content-Length: 9\r\n\r\n", is_head=True),
    Good("100 first", b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi", b"hi"),
    Good("a second response nobody asked for", OK + b"Content-Length: 2\r\n\r\nhi" + OK, b"hi", reusable=False),
    Good("bytes after HEAD's answer", OK + b"Content-Length: 2\r\n\r\nhi", is_head=True, reusable=False),
]


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_good(case: Good) -> None:
    parser = ResponseParser(is_head=case.is_head)
    assert parser.feed(case.data) == case.body
    assert parser.head is not None
    assert parser.head.status == case.status
    assert parser.is_complete is not case.by_close
    parser.eof()
    assert (parser.is_complete, parser.failure, parser.is_reusable) == (True, None, case.reusable)


BAD = {
    "SSH": b"SSH-2.0-OpenSSH_9\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "HTTP/0.9": b"<html>",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "leading blank line": b"\r\n" + OK + b"\r\n",
    "two spaces": b"HTTP/1.1  200 OK\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "status 999": b"HTTP/1.1 999 OK\r\n\r\n",
    "control character in the reason": b"HTTP/1.1 200 O\x00K\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n" + b"x" * 40_000,
    "bare line feed in a header": OK + b"a: b\nc: d\r\n\r\n",
    "bare carriage return in a header": OK + b"a: b\rc: d\r\n\r\n",
    "folded header": OK + b"a: b\r\n c\r\n\r\n",
    "folded first header": OK + b" a: b\r\n\r\n",
    "space before the colon": OK + b"Content-Length : 0\r\n\r\n",
    "no name": OK + b": b\r\n\r\n",
    "no colon": OK + b"abc\r\n\r\n",
    "NUL in a value": OK + b"a: \x00\r\n\r\n",
    "length and chunked": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "the same length twice": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "signed length": OK + b"Content-Length: +5\r\n\r\nhello",
    "hex length": OK + b"Content-Length: 0x5\r\n\r\nhello",
    "empty length": OK + b"Content-Length:\r\n\r\n",
    "length of 30 digits": OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "length in other digits": OK + b"Content-Length: \xb2\r\n\r\n",
    "gzip coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "identity": OK + b"Transfer-Encoding: identity\r\n\r\n",
    "chunked in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "1xx for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 17,
    "negative chunk": CHUNKED + b"-1\r\n",
    "prefixed chunk": CHUNKED + b"0x1\r\na\r\n",
    "underscore in a chunk size": CHUNKED + b"1_0\r\n",
    "empty chunk line": CHUNKED + b"\r\n",
    "chunk of 16 digits": CHUNKED + b"f" * 16 + b"\r\n",
    "bare line feed after a chunk size": CHUNKED + b"1\na\r\n0\r\n\r\n",
    "chunk longer than it said": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "control character in an extension": CHUNKED + b"1;\x01\r\na\r\n",
    "a trailer that is none": CHUNKED + b"0\r\nabc\r\n\r\n",
    "cut in the head": OK + b"a: b\r\n",
    "cut in the body": OK + b"Content-Length: 5\r\n\r\nhell",
    "cut before the last chunk": CHUNKED + b"2\r\nhi\r\n",
    "cut in the last line": CHUNKED + b"2\r\nhi\r\n0\r\n\r",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str) -> None:
    parser = ResponseParser()
    parser.feed(BAD[name])
    parser.eof()
    assert parser.failure is not None
    assert not parser.is_complete
    assert not parser.is_reusable


def test_what_came_before_a_failure_is_the_readers() -> None:
    parser = ResponseParser()
    assert parser.feed(CHUNKED + b"2\r\nhi\r\nzz\r\n") == b"hi"
    assert parser.failure is not None


def at_limit(name: str, over: int) -> bytes:
    """A response whose `name` is as large as its limit allows, or `over` more."""
    if name == "head":
        filler = response_parser.MAX_HEAD_BYTES - len(OK + b"Content-Length: 0\r\na: \r\n\r\n") + over
        return OK + b"Content-Length: 0\r\na: " + b"x" * filler + b"\r\n\r\n"
    if name == "headers":
        return OK + b"a: b\r\n" * (response_parser.MAX_HEADERS - 1 + over) + b"Content-Length: 0\r\n\r\n"
    if name == "chunk line":
        return CHUNKED + b"0;" + b"x" * (response_parser.MAX_CHUNK_LINE_BYTES - 4 + over) + b"\r\n\r\n"
    if name == "trailers":
        filler = response_parser.MAX_HEAD_BYTES - len(b"a: b\r\nc: \r\n\r\n") + over
        return CHUNKED + b"0\r\na: b\r\nc: " + b"x" * filler + b"\r\n\r\n"
    hints = b"HTTP/1.1 103 Hints\r\n\r\n" * (response_parser.MAX_INFORMATIONAL + over)
    return hints + OK + b"Content-Length: 0\r\n\r\n"


@pytest.mark.parametrize("name", ["head", "headers", "chunk line", "trailers", "informational"])
@pytest.mark.parametrize("step", [1, 777, 1 << 20])
def test_limits(name: str, step: int) -> None:
    for over, failed in ((0, False), (1, True)):
        parser, data = ResponseParser(), at_limit(name, over)
        for start in range(0, len(data), step):
            parser.feed(data[start:start + step])
        assert (parser.failure is not None, parser.is_complete) == (failed, not failed), parser.failure


def test_an_endless_head_is_not_hoarded() -> None:
    parser = ResponseParser()
    parser.feed(OK)
    for _ in range(100):
        parser.feed(b"a: " + b"x" * 1000)
    assert parser.failure is not None
