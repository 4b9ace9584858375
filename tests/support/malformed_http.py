"""A corpus of malformed, ambiguous and merely unusual HTTP/1.1, built from RFC 9110 and 9112 and public advisories.

Each case says which statuses the gateway may answer with, in order, and how many requests may reach a worker.
SMUGGLED stands where a second reader could see a request that the first one did not.
"""

from __future__ import annotations

from dataclasses import dataclass

SMUGGLED = b"smuggled-5e1f"
BODY = b'{"model":"stub","prompt":"hello"}'
HIDDEN = b"GET /" + SMUGGLED + b" HTTP/1.1\r\nHost: x\r\n\r\n"
REFUSED, SERVED = (400,), (200,)


@dataclass(frozen=True)
class Malformed:
    """`answers`: the statuses allowed at each position; () as a whole: closed without a word is fine as well."""

    data: bytes
    answers: tuple[tuple[int, ...], ...] = (REFUSED,)
    num_forwarded: int = 0


def post(*headers: bytes, body: bytes = b"", line: bytes = b"POST /v1/completions HTTP/1.1",
         host: bytes = b"Host: x\r\n") -> bytes:
    """A request to a generating route with exactly these header lines."""
    return line + b"\r\n" + host + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


def sized(*headers: bytes, body: bytes = BODY, line: bytes = b"POST /v1/completions HTTP/1.1",
          host: bytes = b"Host: x\r\n") -> bytes:
    """The same with a right Content-Length."""
    return post(b"Content-Length: %d" % len(body), *headers, body=body, line=line, host=host)


def chunked(*chunks: bytes, coding: bytes = b"Transfer-Encoding: chunked", end: bytes = b"0\r\n\r\n") -> bytes:
    """The same in chunks that are given framed."""
    return post(coding, body=b"".join(chunks) + end)


CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


def served(data: bytes, *more: tuple[int, ...], forwarded: int = 1) -> Malformed:
    """Unusual and right."""
    return Malformed(data, (SERVED, *more), forwarded)


def either(data: bytes) -> Malformed:
    """The RFC allows a server to mend it or to refuse it; what is forwarded must be whole."""
    return Malformed(data, ((200, 400),), 1)


LENGTHS = {
    f"length {text!r}": Malformed(post(b"Content-Length: " + text, body=BODY))
    for text in (b"+33", b"-33", b"0x21", b"33, 34", b"33,33x", b"33;", b"3 3", b"3_3", b"33.0", b"1e2", b"",
                 b"\xd9\xa3", b"99999999999999999999999", b"-0", b"33\x00", b"\x0b33")}
LENGTHS |= {
    "length repeated, equal": either(post(b"Content-Length: 33", b"Content-Length: 33", body=BODY)),
    "length repeated in a list": either(post(b"Content-Length: 33, 33", body=BODY)),
    "length repeated, different": Malformed(post(b"Content-Length: 33", b"Content-Length: 5", body=BODY + HIDDEN)),
    "length zero and then another": Malformed(post(b"Content-Length: 0", b"Content-Length: 33", body=BODY)),
    "length with zeros before it": either(post(b"Content-Length: 0033", body=BODY)),
    "length behind blanks": served(post(b"Content-Length: \t 33 ", body=BODY)),
    "length under another name": Malformed(post(b"Content_Length: 33", body=HIDDEN), (REFUSED, (404,))),
    "length shorter than the body": Malformed(post(b"Content-Length: 2", body=b"{}" + HIDDEN), (REFUSED, (404,))),
    "length longer than the body": Malformed(post(b"Content-Length: 99", body=BODY)),
    "no length at all": Malformed(post(body=HIDDEN), (REFUSED, (404,))),
}

BOTH = {
    "CL.TE": Malformed(post(b"Content-Length: 33", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + HIDDEN)),
    "TE.CL": Malformed(post(b"Transfer-Encoding: chunked", b"Content-Length: 4",
                            body=b"5c\r\n" + HIDDEN + b"0\r\n\r\n")),
    "CL.TE with the chunks right": Malformed(post(b"Content-Length: %d" % len(CHUNK + b"0\r\n\r\n"),
                                                  b"Transfer-Encoding: chunked", body=CHUNK + b"0\r\n\r\n")),
    "CL.0": Malformed(post(b"Content-Length: %d" % len(HIDDEN), body=HIDDEN, line=b"POST /livez HTTP/1.1"),
                      ((405,),)),
    "length in a Connection list": served(sized(b"Connection: Content-Length")),
    "GET with a body": Malformed(sized(body=HIDDEN, line=b"GET /livez HTTP/1.1"), (SERVED,)),
    "HEAD with a body": Malformed(sized(body=HIDDEN, line=b"HEAD /livez HTTP/1.1"), (SERVED,)),
}

CODINGS = {
    f"coding {text!r}": Malformed(post(text, body=CHUNK + b"0\r\n\r\n"), ((400, 501),))
    for text in (b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked",
                 b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: identity",
                 b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding: chunked\x00",
                 b"Transfer-Encoding: \"chunked\"", b"Transfer-Encoding: chunked;q=1",
                 b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, chunked",
                 b"Transfer-Encoding:\r\n chunked", b"Transfer-Encoding:",
                 b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"Transfer-Encoding: chunked\rX: y",
                 b" Transfer-Encoding: chunked", b"X: y\n Transfer-Encoding: chunked",
                 b"Transfer-Encoding\n: chunked", b"Transfer-Encoding: chun\xc4\xb1ed",
                 b"\x00Transfer-Encoding: chunked", b"Transfer Encoding: chunked")}
CODINGS |= {
    "coding in capitals": served(chunked(CHUNK, coding=b"tRANSFER-eNCODING: CHUNKED")),
    "coding behind a tab": either(chunked(CHUNK, coding=b"Transfer-Encoding:\tchunked\t")),
    "coding of an old client": Malformed(post(b"Transfer-Encoding: chunked", body=CHUNK + b"0\r\n\r\n" + HIDDEN,
                                              line=b"POST /v1/completions HTTP/1.0")),
    "coding under another name": Malformed(post(b"Transfer_Encoding: chunked", body=HIDDEN), (REFUSED, (404,))),
}

_HALF = len(BODY) // 2
_TWO = [b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:_HALF], BODY[_HALF:])]
_SIZE = b"%x" % len(BODY)
CHUNKS = {f"chunk size {size!r}": Malformed(chunked(size + b"\r\n" + BODY + b"\r\n")) for size in (
    b"-21", b"+21", b"0x21", b" 21", b"21 21", b"2_1", b"", b"g", b"\xd9\xa3", b"21\x00", b"10000000000000021",
    b"fffffffffffffffff", b"21\r", b"2 1", b";x=y")}
CHUNKS |= {
    "chunks, two": served(chunked(*_TWO)),
    "chunk size in capitals with zeros": served(chunked(b"000" + _SIZE.upper() + b"\r\n" + BODY + b"\r\n")),
    "chunk extensions": served(chunked(_SIZE + b";a=b;c=\"d e\"\r\n" + BODY + b"\r\n")),
    "chunk extension ended by a bare LF": Malformed(chunked(_SIZE + b";a\n" + BODY + b"\r\n")),
    "chunk extension with a bare LF inside": Malformed(chunked(_SIZE + b";a=b\nc\r\n" + BODY + b"\r\n")),
    "chunk extension with a bare CR inside": Malformed(chunked(_SIZE + b";a=b\rc\r\n" + BODY + b"\r\n")),
    "chunk extension of 1 MB": either(chunked(_SIZE + b";" + b"a" * 1_000_000 + b"\r\n" + BODY + b"\r\n")),
    "chunk size ended by a bare LF": Malformed(chunked(_SIZE + b"\n" + BODY + b"\r\n")),
    "chunk ended by a bare LF": Malformed(chunked(_SIZE + b"\r\n" + BODY + b"\n")),
    "chunk longer than its size": Malformed(chunked(b"5\r\n" + BODY + b"\r\n")),
    "chunk shorter than its size": Malformed(chunked(b"ff\r\n" + BODY + b"\r\n")),
    "chunk of the size of an exabyte": Malformed(chunked(b"fffffffffffffff\r\n" + BODY + b"\r\n"), ((400, 413),)),
    "chunk that never comes": Malformed(post(b"Transfer-Encoding: chunked", body=_SIZE + b"\r\n" + BODY + b"\r\n")),
    "last chunk ended by a bare LF": Malformed(chunked(CHUNK, end=b"0\n\n" + HIDDEN)),
    "last chunk with an extension": served(chunked(CHUNK, end=b"0;x=y\r\n\r\n")),
    "last chunk of many zeros": served(chunked(CHUNK, end=b"00000\r\n\r\n")),
    "trailers": served(chunked(CHUNK, end=b"0\r\nX-Trailer: y\r\n\r\n")),
    "trailers that would be headers": either(chunked(CHUNK, end=b"0\r\nContent-Length: 5\r\nHost: " + SMUGGLED
                                                     + b"\r\nx-headstart-tenant: " + SMUGGLED + b"\r\n\r\n")),
    "trailer without a colon": Malformed(chunked(CHUNK, end=b"0\r\nGET /" + SMUGGLED + b" HTTP/1.1\r\n\r\n")),
    "trailer behind a bare LF": Malformed(chunked(CHUNK, end=b"0\r\nX: y\n\r\n")),
    "trailers without end": Malformed(chunked(CHUNK, end=b"0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n"), ((400, 431),)),
}

HEADERS = {f"header line {line!r}": Malformed(sized(line)) for line in (
    b"X : y", b" X: y", b"\tX: y", b": y", b"no colon", b"X\x00: y", b"X: a\x00b", b"X: a\rb", b"X: a\nb c",
    b"X Y: z", b"X(: y", b"X\x7f: y", b"X\xc3\xa4: y", b"X: y\r\n folded", b"X: y\r\n\tfolded", b"X: a\r\r\nY: b",
    b"\"X\": y", b"X@: y")}
HEADERS |= {
    "host missing": Malformed(sized(host=b"")),
    "host missing, old client": served(sized(line=b"POST /v1/completions HTTP/1.0", host=b"")),
    "host twice": Malformed(sized(host=b"Host: x\r\nHost: " + SMUGGLED + b"\r\n")),
    "host with a blank": Malformed(sized(host=b"Host: x y\r\n")),
    "host with a path": Malformed(sized(host=b"Host: x/" + SMUGGLED + b"\r\n")),
    "host with a user": Malformed(sized(host=b"Host: user@x\r\n")),
    "bare LF everywhere": Malformed(sized().replace(b"\r\n", b"\n")),
    "bare LF at the end of the head": Malformed(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\n" + HIDDEN),
    "bare CR everywhere": Malformed(sized().replace(b"\r\n", b"\r")),
    "two content types": either(sized(b"Content-Type: application/json", b"Content-Type: " + SMUGGLED)),
    "a header of 9 KB": Malformed(sized(b"X: " + b"y" * 9_000), ((400, 431),)),
    "a head of 1 MB in one line": Malformed(sized(b"X: " + b"y" * 1_000_000), ((400, 431),)),
    "2,000 headers": Malformed(sized(*(b"h%d: x" % number for number in range(2_000))), ((400, 431),)),
    "unknown header with odd bytes": served(sized(b"X-Odd: \xe4\xff ~!")),
    "internal headers": served(sized(b"x-headstart-tenant: " + SMUGGLED, b"X-Headstart-Salt: " + SMUGGLED,
                                     b"X-HEADSTART-WORKER-TOKEN: " + SMUGGLED, b"x_headstart_tenant: " + SMUGGLED)),
    "hop-by-hop headers": served(sized(b"Connection: keep-alive, X-Hop", b"X-Hop: " + SMUGGLED, b"Keep-Alive: 5",
                                       b"Proxy-Authorization: " + SMUGGLED, b"TE: trailers", b"Trailer: " + SMUGGLED,
                                       b"Proxy-Connection: " + SMUGGLED)),
}

_LINES = (b"POST\t/v1/completions HTTP/1.1",
          b"POST /v1/completions\tHTTP/1.1", b"POST /v1/completions HTTP/1.1 x", b"POST /v1/completions http/1.1",
          b"POST /v1/completions HTTP/2.0", b"POST /v1/completions HTTP/1.10", b"POST /v1/completions HTTP/01.1",
          b"POST /v1/completions HTTP/1,1", b"POST /v1/completions HTTPS/1.1", b"POST /v1/com\x00pletions HTTP/1.1",
          b"POST /v1/com pletions HTTP/1.1", b"POST /v1/completions", b" POST /v1/completions HTTP/1.1",
          b"POST\x00 /v1/completions HTTP/1.1", b"PO(ST /v1/completions HTTP/1.1", b"POST /v1/completions HTTP/-1.1",
          b"POST v1/completions HTTP/1.1", b"POST http://[ HTTP/1.1", b"POST /v1/com\x7fpletions HTTP/1.1",
          b"POST /v1/completions\r HTTP/1.1")
LINES = {f"line {line!r}": Malformed(sized(line=line), ((400, 404, 405, 505),)) for line in _LINES}
LINES |= {
    "two blanks before the target": either(sized(line=b"POST  /v1/completions HTTP/1.1")),
    "two blanks behind the target": either(sized(line=b"POST /v1/completions  HTTP/1.1")),
    "version 1.2": Malformed(sized(line=b"POST /v1/completions HTTP/1.2"), ((400, 505),)),
    "method in small letters": Malformed(sized(line=b"post /v1/completions HTTP/1.1"), ((400, 405),)),
    "method of 10 KB": Malformed(sized(line=b"P" * 10_000 + b" / HTTP/1.1"), ((400, 501),)),
    "empty lines before it": served(b"\r\n\r\n" + sized()),
    "target of 10 KB": Malformed(sized(line=b"POST /" + b"a" * 10_000 + b" HTTP/1.1"), ((400, 414, 431),)),
    "absolute target": served(sized(line=b"POST http://x/v1/completions HTTP/1.1")),
    "absolute target elsewhere": either(sized(line=b"POST http://" + SMUGGLED + b"/v1/completions HTTP/1.1")),
    "absolute target with a user": either(sized(line=b"POST http://a@" + SMUGGLED + b"/v1/completions HTTP/1.1")),
    "absolute target of another kind": either(sized(line=b"POST file:///v1/completions HTTP/1.1")),
    "authority target": Malformed(post(line=b"CONNECT x:80 HTTP/1.1"), ((400, 404, 405),)),
    "asterisk": Malformed(post(line=b"OPTIONS * HTTP/1.1"), ((400, 404, 405),)),
    "two slashes": Malformed(sized(line=b"POST //" + SMUGGLED + b"/v1/completions HTTP/1.1"), ((404,),)),
    "dots": Malformed(sized(line=b"POST /v1/../admin/workers HTTP/1.1"), ((400, 404, 401, 405),)),
    "dots in percent": Malformed(sized(line=b"POST /v1/%2e%2e/admin/explain HTTP/1.1"), ((400, 404, 401, 405),)),
    "fragment": Malformed(sized(line=b"POST /v1/completions#" + SMUGGLED + b" HTTP/1.1"), ((200, 400, 404),), 1),
    "query with line ends in percent": served(sized(
        line=b"POST /v1/completions?x=%0d%0aX-Y:%20" + SMUGGLED + b" HTTP/1.1")),
    "path with line ends in percent": Malformed(sized(
        line=b"POST /v1/completions%0d%0aX-Y:%20" + SMUGGLED + b" HTTP/1.1"), ((404,),)),
}

# What comes in one read with rubbish is refused together with it.
_FIRST_OR_NONE = ((200, 400), (400,))
OTHERS = {
    "nothing": Malformed(b"", ()),
    "HTTP/0.9": Malformed(b"GET /livez\r\n", ()),
    "HTTP/2 preface": Malformed(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x12\4\0\0\0\0\0", ((400, 505),)),
    "TLS hello": Malformed(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 64),
    "upgrade to h2c": Malformed(sized(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c",
                                      b"HTTP2-Settings: AAMAAABkAAQAAP__"), ((200, 400),), 1),
    "upgrade to h2c and a second request": Malformed(
        sized(b"Connection: Upgrade", b"Upgrade: h2c") + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        ((200, 400), (200, 400)), 1),
    "upgrade to a web socket": Malformed(
        b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n" + HIDDEN,
        (SERVED, (404,))),
    "expect nonsense": Malformed(sized(b"Expect: " + SMUGGLED), ((417,),)),
    "expect continue": served(sized(b"Expect: 100-continue")),
    "expect continue with both framings": Malformed(post(
        b"Expect: 100-continue", b"Content-Length: 5", b"Transfer-Encoding: chunked", body=CHUNK)),
    "expect continue and no body": Malformed(post(b"Expect: 100-continue", b"Content-Length: 33")),
    "three at once": Malformed(sized() * 3, (SERVED,) * 3, 3),
    "a right one, a wrong one, a right one": Malformed(sized() + sized(b"X : y") + sized(), _FIRST_OR_NONE, 1),
    "a right one and rubbish": Malformed(sized() + b"\x00\xff rubbish\r\n\r\n", _FIRST_OR_NONE, 1),
    "a right one and half of another": Malformed(sized() + sized()[:-5], (SERVED, REFUSED), 1),
    "a wrong body and a right one": Malformed(sized(body=b"{") + sized(), (REFUSED, SERVED), 1),
    "body of another length behind it": Malformed(sized(body=BODY + b" " * 9) + HIDDEN, (SERVED, (404,)), 1),
    "a body that is a request": Malformed(sized(body=HIDDEN)),
    "a stream and another request": Malformed(
        sized(body=BODY[:-1] + b',"stream":true}') + sized(), (SERVED, SERVED), 2),
    "an old client, kept alive": Malformed(
        sized(b"Connection: keep-alive", line=b"POST /v1/completions HTTP/1.0") * 2, (SERVED, SERVED), 2),
    "an old client that asks for two and says nothing of keeping": Malformed(
        sized(line=b"POST /v1/completions HTTP/1.0") * 2, ((200, 400),), 1),
    "close and one more": Malformed(sized(b"Connection: close") + sized(), ((200, 400),), 1),
    "close and an empty line": served(sized(b"Connection: close") + b"\r\n"),
    "gzip that is none": Malformed(sized(b"Content-Encoding: gzip")),
    "an encoding nobody knows": Malformed(sized(b"Content-Encoding: " + SMUGGLED), ((415,),)),
    "two encodings": Malformed(sized(b"Content-Encoding: gzip, gzip"), ((415,),)),
    "another method by header": served(sized(b"X-HTTP-Method-Override: DELETE")),
}

CORPUS: dict[str, Malformed] = LENGTHS | BOTH | CODINGS | CHUNKS | HEADERS | LINES | OTHERS
