"""Known heads: never two under one key but for their length, and a cut where the head ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.server.known_heads import HEADS_MAX, KnownHeads

LINES = st.sampled_from([b"Host: x", b"Content-Length: ", b"content-length: ", b"Content-Length:",
                         b"Content-Length: 7", b"Content-Length: 70", b"X: Content-Length: 7", b"X: 7",
                         b"A: b", b"", b"Content-Length: 07",
                         b"Transfer-Encoding: chunked", b"Content-Length: 7 "])
HEADS = st.lists(LINES, min_size=1, max_size=6).map(
    lambda lines: b"\r\n".join([b"POST / HTTP/1.1", *lines]) + b"\r\n\r\n")


@settings(max_examples=400, deadline=None)
@given(HEADS, HEADS)
def test_one_key_is_one_head_but_for_the_number_at_one_place(one: bytes, other: bytes) -> None:
    heads: KnownHeads[int] = KnownHeads()
    first, second = heads.cut(one), heads.cut(other)
    if first is None or second is None or first.key != second.key:
        return
    at = first.key[0]
    assert at == second.key[0]
    assert one[:at] == other[:at]
    assert one[at:first.end].lstrip(b"0123456789") == other[at:second.end].lstrip(b"0123456789")


@given(HEADS, st.binary(max_size=40))
def test_a_cut_says_where_the_first_head_ends(head: bytes, body: bytes) -> None:
    cut = KnownHeads[int]().cut(head + body)
    if cut is not None:
        assert head.startswith((head + body)[:cut.end])
        assert (head + body)[:cut.end].endswith(b"\r\n\r\n")
        start = cut.key[0]
        assert head[start:].startswith(str(cut.length).encode() + b"\r\n")


def test_the_memory_is_bounded_and_what_is_used_stays() -> None:
    heads: KnownHeads[int] = KnownHeads()
    used = heads.cut(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n")
    assert used is not None
    heads.put(used, -1)
    for number in range(3 * HEADS_MAX):
        cut = heads.cut(b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n" % number)
        assert cut is not None
        heads.put(cut, number)
        assert heads.get(used) == -1
        assert len(heads) <= HEADS_MAX
    heads.forget()
    assert heads.get(used) is None
