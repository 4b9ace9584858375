"""Our half of ZMTP against a plain encoder: the same messages however the bytes are cut."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.knowledge import zmtp
from gateway.knowledge.zmtp import FRAMES_MAX, GREETING, Peer, ZmtpError, dealer, encode_message, subscriber

PUB_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(16 + 32)
PUB_READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"
MESSAGES = st.lists(st.lists(st.binary(max_size=40) | st.sampled_from([b"x" * 255, b"x" * 256, b"x" * 3000]),
                             min_size=1, max_size=4), max_size=6)


def on_the_wire(messages: Sequence[Sequence[bytes]], *, long: bool = False) -> bytes:
    wire = b""
    for message in messages:
        for number, part in enumerate(message):
            more = 1 if number < len(message) - 1 else 0
            is_long = long or len(part) > 255
            wire += struct.pack(">BQ", more | 2, len(part)) if is_long else struct.pack(">BB", more, len(part))
            wire += part
    return wire


def cut(wire: bytes, places: Sequence[int]) -> Iterator[bytes]:
    edges = sorted({0, len(wire), *(place % (len(wire) + 1) for place in places)})
    for start, end in pairwise(edges):
        yield wire[start:end]


@given(MESSAGES, st.lists(st.integers(0, 1 << 20), max_size=30), st.booleans())
def test_the_same_messages_however_the_bytes_are_cut(messages: list[list[bytes]], places: list[int],
                                                     long: bool) -> None:
    wire = PUB_GREETING + PUB_READY + on_the_wire(messages, long=long)
    for pieces in (cut(wire, places), cut(wire, range(len(wire))), [wire]):
        peer, seen, said = subscriber(b"topic"), [], b""
        for piece in pieces:
            seen += peer.feed(piece)
            said += peer.taken_output()
        assert seen == messages
        assert said == b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB" + b"\0\x06\x01topic"
        assert peer.is_ready


@given(MESSAGES)
def test_what_a_dealer_sends_is_what_a_router_reads(messages: list[list[bytes]]) -> None:
    assert b"".join(map(encode_message, messages)) == on_the_wire(messages)
    router, ours = Peer(b"ROUTER", (b"DEALER",)), dealer()
    router.feed(GREETING)
    ours.feed(GREETING)
    assert router.feed(ours.taken_output()) == []
    assert ours.feed(router.taken_output()) == []
    assert router.is_ready
    assert ours.is_ready
    assert router.feed(b"".join(map(encode_message, messages))) == messages


@given(st.binary(max_size=200), st.integers(0, 2))
def test_whatever_else_comes_is_an_error_of_its_own(data: bytes, beginning: int) -> None:
    peer = subscriber(b"")
    for wire in (PUB_GREETING, PUB_READY)[:beginning]:
        peer.feed(wire)
    with suppress(ZmtpError):
        for at in range(len(data)):
            peer.feed(data[at:at + 1])


def test_our_greeting_is_64_bytes_of_zmtp_3_0() -> None:
    assert (len(GREETING), GREETING[0], GREETING[9], GREETING[10:12]) == (64, 0xff, 0x7f, b"\x03\x00")
    assert GREETING[12:32].rstrip(b"\0") == b"NULL"


@pytest.mark.parametrize(("wire", "why"), [
    (b"HTTP/1.1 400 Bad Request\r\n", "does not speak ZMTP"),
    (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "ZMTP 1"),
    (PUB_GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "CURVE"),
    (PUB_GREETING + PUB_READY.replace(b"PUB", b"REP"), "REP"),
    (PUB_GREETING + PUB_READY.replace(b"\0\0\0\x03", b"\0\0\0\x09"), "torn"),
    (PUB_GREETING + b"\0\x01x", "before READY"),
    (PUB_GREETING + b"\x04\x0c\x05ERROR\x05wrong", "wrong"),
    (PUB_GREETING + PUB_READY + b"\x08\x00", "flags 8"),
    (PUB_GREETING + PUB_READY + b"\x02" + (1 << 40).to_bytes(8, "big"), "bytes"),
    (PUB_GREETING + PUB_READY + b"\x01\x01x" * (FRAMES_MAX + 1), f"over {FRAMES_MAX} frames"),
])
def test_what_is_no_publisher_is_told_why(wire: bytes, why: str) -> None:
    with pytest.raises(ZmtpError, match=why):
        subscriber(b"").feed(wire)


def test_a_message_has_a_limit_over_all_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp, "MESSAGE_MAX_BYTES", 100)
    peer = subscriber(b"")
    peer.feed(PUB_GREETING + PUB_READY)
    assert peer.feed(on_the_wire([[b"x" * 60, b"x" * 40], [b"x" * 100]])) == [
        [b"x" * 60, b"x" * 40], [b"x" * 100]]
    with pytest.raises(ZmtpError):
        peer.feed(on_the_wire([[b"x" * 60, b"x" * 41]]))


def test_a_ping_is_answered_with_its_context() -> None:
    peer = subscriber(b"")
    peer.feed(PUB_GREETING + PUB_READY)
    peer.taken_output()
    peer.feed(b"\x04\x0a\x04PING\0\x0aabc")
    assert peer.taken_output() == b"\x04\x08\x04PONGabc"
