"""Request bodies that came with gzip or deflate (RFC 1952, 1950, 1951), for both processes.

Owns how they grow: piece by piece, up to a limit, with the event loop's other work in between. aiohttp's own way
inflates to the end whatever it is told to drop, which for a body of 2 MB may be gigabytes.
"""

from __future__ import annotations

import asyncio
import zlib

ENCODINGS = ("identity", "gzip", "deflate")
# What both processes say of a body in another one, and of one that is not what it should be.
ENCODINGS_TEXT = "Request bodies may be sent as they are, or with gzip or deflate."
TORN_TEXT = "The request body ended early or is badly encoded."
# Of what has grown, before others get their turn: about a millisecond.
PIECE_BYTES = 1 << 20
GIVEN_BYTES = 1 << 18
MEMBERS_MAX = 8     # of a gzip body; who packs it at once makes one
_GZIP, _ZLIB, _BARE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD = 8


class UnknownEncoding(Exception):
    """It is none of ENCODINGS."""


class BadlyEncoded(Exception):
    """What came is not what its encoding says, or not all of it."""


class GrownTooLarge(Exception):
    """More than the limit."""


async def decoded(raw: bytes, encoding: str | None, limit_bytes: int) -> bytes:
    """`raw` without its Content-Encoding, a header as it came or None."""
    encoding = (encoding or "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise UnknownEncoding
    if encoding == "identity" or not raw:
        return raw
    try:
        return await _grown(raw, _format_of(raw, encoding), limit_bytes)
    except zlib.error:
        raise BadlyEncoded from None


def _format_of(raw: bytes, encoding: str) -> int:
    """zlib's number for it. Some send deflate without the header that the RFC asks for."""
    if encoding == "gzip":
        return _GZIP
    return _ZLIB if raw[0] & 0xF == _ZLIB_METHOD else _BARE


async def _grown(raw: bytes, form: int, limit_bytes: int) -> bytes:
    grown, given, at, left = bytearray(), memoryview(b""), 0, MEMBERS_MAX
    view, engine = memoryview(raw), zlib.decompressobj(form)
    while not engine.eof:
        if not given:
            given = view[at:at + GIVEN_BYTES]
            at += len(given)
        piece = engine.decompress(given, PIECE_BYTES)
        if not piece and not given:
            raise BadlyEncoded      # it ends early
        grown += piece
        if len(grown) > limit_bytes:
            raise GrownTooLarge
        given = memoryview(engine.unconsumed_tail)
        if engine.eof and (more := len(engine.unused_data) + len(raw) - at):
            at, left = len(raw) - more, left - 1
            if form != _GZIP or not left:
                raise BadlyEncoded
            engine, given = zlib.decompressobj(form), memoryview(b"")
        await asyncio.sleep(0)
    return bytes(grown)
