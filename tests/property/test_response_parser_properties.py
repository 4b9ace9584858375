"""The response parser: however the bytes are cut, the outcome is the same; what was framed comes out unframed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gateway.relay.response_parser import ResponseHead, ResponseParser


@dataclass(frozen=True)
class Outcome:
    """What matters of a response; the words of a failure may depend on when it was noticed."""

    head: ResponseHead | None
    body: bytes
    is_complete: bool
    failed: bool
    is_reusable: bool


def outcome(pieces: list[bytes], *, is_head: bool = False) -> Outcome:
    parser = ResponseParser(is_head=is_head)
    body = b"".join([parser.feed(piece) for piece in pieces])
    reusable = parser.is_reusable
    parser.eof()
    return Outcome(parser.head, body, parser.is_complete, parser.failure is not None, reusable)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def chunked(pieces: list[bytes], extension: bytes, trailers: bytes) -> bytes:
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces if piece)
    return framed + b"0" + extension + b"\r\n" + trailers + b"\r\n"


EXTENSIONS = st.sampled_from([b"", b";a", b' ; a="b c"', b";x=1;y=2"])
TRAILERS = st.sampled_from([b"", b"x-sum: 1\r\n", b"a: \r\nb:2\r\n"])
LEFTOVER = st.sampled_from([b"", b"\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"x"])
INFORMATIONAL = st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n",
                                 b"HTTP/1.1 102 \r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"])
CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(st.lists(st.binary(max_size=40), max_size=6), EXTENSIONS, TRAILERS, LEFTOVER, INFORMATIONAL, CUTS)
def test_chunks_come_out_whole(pieces: list[bytes], extension: bytes, trailers: bytes, leftover: bytes,
                               informational: bytes, at: list[int]) -> None:
    response = (informational + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
                + chunked(pieces, extension, trailers) + leftover)
    for way in (cut(response, at), [response], [response[index:index + 1] for index in range(len(response))]):
        assert outcome(way) == Outcome(ResponseHead(200, {"transfer-encoding": "chunked", "x-a": "b"}),
                                       b"".join(pieces), is_complete=True, failed=False, is_reusable=not leftover)


@given(st.binary(max_size=60), st.sampled_from(["length", "close"]), LEFTOVER, CUTS)
def test_bodies_by_length_and_by_close(body: bytes, framing: str, leftover: bytes, at: list[int]) -> None:
    by_length = framing == "length"
    header = b"Content-Length: %d\r\n" % len(body) if by_length else b""
    found = outcome(cut(b"HTTP/1.1 200\r\n" + header + b"\r\n" + body + leftover, at))
    assert (found.is_complete, found.failed) == (True, False)
    assert found.body == (body if by_length else body + leftover)
    assert found.is_reusable is (by_length and not leftover)


FRAGMENTS = st.sampled_from([
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 100 Continue\r\n\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: +5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: close\r\n", b" folded\r\n", b"a : b\r\n", b"a: \x00\r\n",
    b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"0x5\r\n", b"-1\r\n", b"5;ext\r\nhello\r\n", b"hello", b"\n", b"\r",
    b"ffffffffffffffff\r\n", b"5 \r\n", b"HTTP/2 200\r\n", b"HTTP/1.1 20 OK\r\n", b"HTTP/1.1 101 Up\r\n\r\n",
])


@given(st.lists(FRAGMENTS, max_size=10), CUTS, st.booleans())
@example([b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n", b"5\r\nhello\r\n", b"\n"], [40], False)
def test_good_or_bad_the_cuts_do_not_matter(fragments: list[bytes], at: list[int], is_head: bool) -> None:
    data = b"".join(fragments)
    whole = outcome([data], is_head=is_head)
    assert outcome(cut(data, at), is_head=is_head) == whole
    assert outcome([data[index:index + 1] for index in range(len(data))], is_head=is_head) == whole
    assert whole.is_complete != whole.failed


@given(st.binary(max_size=200), CUTS)
def test_garbage_is_a_failure_however_it_comes(data: bytes, at: list[int]) -> None:
    found = outcome(cut(data, at))
    assert found == Outcome(None, b"", is_complete=False, failed=True, is_reusable=False)


# RFC 9112 and 9110 in one expression, which a parser should not run on every answer.
_LINE = rb"\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*"
_HEAD = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?((?:%b)*)" % _LINE)
PARTS = st.sampled_from([b"x", b"A-b", b":", b": ", b"\r\n", b"\r", b"\n", b" ", b"\t", b"\x00", b"\x7f", b"\xe4",
                         b"(", b"a: b", b"\r\na:b", b"\r\nA: c", b"\r\nb : c"])


@settings(max_examples=400)
@given(st.lists(PARTS, max_size=8).map(b"".join))
def test_a_head_is_what_the_grammar_says(rest: bytes) -> None:
    raw = b"HTTP/1.1 200" + rest
    assume((raw + b"\r\n\r\n").find(b"\r\n\r\n") == len(raw))
    parser = ResponseParser()
    parser.feed(raw + b"\r\n\r\n")
    matched = _HEAD.fullmatch(raw)
    assert (parser.head is not None) == (matched is not None)
    if parser.head is not None and matched is not None:
        lines = [line.decode("latin-1").partition(":") for line in matched[2].split(b"\r\n")[1:]]
        expected: dict[str, str] = {}
        for name, _, value in lines:
            value = value.strip(" \t")
            expected[name.lower()] = f"{expected[name.lower()]}, {value}" if name.lower() in expected else value
        assert parser.head == ResponseHead(200, expected)
