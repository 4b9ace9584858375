"""Compressed bodies grow to what was packed, stop at the limit, and let the loop's other work in between."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.body_encoding import (
    GIVEN_BYTES,
    MEMBERS_MAX,
    PIECE_BYTES,
    BadlyEncoded,
    GrownTooLarge,
    UnknownEncoding,
    decoded,
)

BODIES = st.one_of(st.binary(max_size=300), st.binary(min_size=1, max_size=9).map(lambda some: some * 200_000))
LIMIT_BYTES = 4 * PIECE_BYTES


def bare_deflate(body: bytes) -> bytes:
    engine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return engine.compress(body) + engine.flush()


@given(body=BODIES, pack=st.sampled_from([("gzip", gzip.compress), (" GZip ", gzip.compress),
                                          ("deflate", zlib.compress), ("identity", bytes), (None, bytes)]))
def test_what_was_packed_comes_out(body: bytes, pack: tuple[str | None, Callable[[bytes], bytes]]) -> None:
    encoding, packed = pack[0], pack[1](body)
    assert asyncio.run(decoded(packed, encoding, LIMIT_BYTES)) == body


@given(body=st.binary(min_size=1, max_size=300))
def test_deflate_without_its_header_is_read_too(body: bytes) -> None:
    packed = bare_deflate(body)
    if packed[0] & 0xF != 8:    # else it looks like one with a header
        assert asyncio.run(decoded(packed, "deflate", LIMIT_BYTES)) == body


@given(bodies=st.lists(st.binary(max_size=50), min_size=1, max_size=MEMBERS_MAX + 2), cut=st.integers(0, 10))
def test_a_gzip_body_has_a_few_whole_members(bodies: list[bytes], cut: int) -> None:
    packed = b"".join(map(gzip.compress, bodies))
    packed = packed[:len(packed) - cut]
    if cut == 0 and len(bodies) <= MEMBERS_MAX:
        assert asyncio.run(decoded(packed, "gzip", LIMIT_BYTES)) == b"".join(bodies)
    elif packed:
        with pytest.raises(BadlyEncoded):
            asyncio.run(decoded(packed, "gzip", LIMIT_BYTES))


@pytest.mark.parametrize(("raw", "encoding"), [
    (b"{}", "gzip"), (b"{}", "deflate"), (zlib.compress(b"{}") + b"x", "deflate"),
    (gzip.compress(b"{}") + b"x", "gzip"), (gzip.compress(b"{}")[:-1], "gzip"),
    (zlib.compress(b"{}" * 99)[:-5], "deflate")])
def test_what_is_not_its_encoding_is_refused(raw: bytes, encoding: str) -> None:
    with pytest.raises(BadlyEncoded):
        asyncio.run(decoded(raw, encoding, LIMIT_BYTES))


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x", ""])
def test_another_encoding_is_refused(encoding: str) -> None:
    if encoding:
        with pytest.raises(UnknownEncoding):
            asyncio.run(decoded(b"{}", encoding, LIMIT_BYTES))
    else:
        assert asyncio.run(decoded(b"{}", encoding, LIMIT_BYTES)) == b"{}"


def test_it_stops_at_the_limit() -> None:
    """What comes behind would be an error, were it looked at; a body that just fits is whole."""
    bomb = gzip.compress(bytes(LIMIT_BYTES + 3 * PIECE_BYTES))
    with pytest.raises(GrownTooLarge):
        asyncio.run(decoded(bomb[:-8] + b"no crc..", "gzip", LIMIT_BYTES))
    assert len(asyncio.run(decoded(gzip.compress(bytes(LIMIT_BYTES)), "gzip", LIMIT_BYTES))) == LIMIT_BYTES


@pytest.mark.parametrize(("body", "turns_min"), [(bytes(LIMIT_BYTES), LIMIT_BYTES // PIECE_BYTES),
                                                 (None, LIMIT_BYTES // GIVEN_BYTES)])
async def test_others_get_their_turn_meanwhile(body: bytes | None, turns_min: int) -> None:
    """Whether little grows to much, or much hardly grows (stored, as if nothing could be packed)."""
    packed = gzip.compress(bytes(LIMIT_BYTES) if body is None else body, 0 if body is None else 9)
    reading, turns = asyncio.create_task(decoded(packed, "gzip", LIMIT_BYTES)), 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(reading.result()) == LIMIT_BYTES
    assert turns >= turns_min
