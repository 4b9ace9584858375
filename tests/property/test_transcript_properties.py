"""What a transcript lets pass and what it understands afterwards, against the list of deltas that made the stream."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.shortcut import UNSETTLED_MAX, Shortcut
from gateway.relay.sse import StreamTail
from gateway.relay.transcript import KEPT_BYTES, Told, Transcript
from worker.protocol.told_tokens import ToldTokens, decode_told, encode_told

HEAD = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 5, "model": "m", "system_fingerprint": "f"}
NUM_CHOICES = 3


@dataclass
class Delta:
    choice: int
    token_ids: list[int]
    text: str
    has_role: bool
    is_last: bool

    def events(self) -> list[bytes]:
        """Role, then text; tokens without text have no event."""
        deltas = [{"role": "assistant", "content": ""}] if self.has_role else []
        deltas += [{"content": self.text}] if self.text or self.is_last else []
        ends = [None] * (len(deltas) - 1) + ["stop" if self.is_last else None] if deltas else []
        choices = [{"index": self.choice, "delta": delta, "finish_reason": end}
                   for delta, end in zip(deltas, ends, strict=True)]
        return [b"data: " + orjson.dumps({**HEAD, "choices": [choice]}) for choice in choices]

    def written(self) -> bytes:
        events = self.events()
        return encode_told(self.choice, len(events), self.token_ids) + b"".join(event + b"\n\n" for event in events)


@st.composite
def streams(draw: st.DrawFn) -> list[Delta]:
    open_choices, seen = list(range(NUM_CHOICES)), set[int]()
    deltas = []
    for _ in range(draw(st.integers(1, 12))):
        if not open_choices:
            break
        choice = draw(st.sampled_from(open_choices))
        is_last = draw(st.booleans()) and draw(st.booleans())
        text = draw(st.text(st.sampled_from("aé😀\n\": ids 0 1 7"), max_size=6))
        token_ids = draw(st.lists(st.integers(0, 400), max_size=3))
        deltas.append(Delta(choice, token_ids, text, choice not in seen, is_last))
        seen.add(choice)
        if is_last:
            open_choices.remove(choice)
    return deltas


@given(streams(), st.data())
def test_any_cut_in_any_pieces(deltas: list[Delta], data: st.DataObject) -> None:
    wire = b"".join(delta.written() for delta in deltas)
    cut = data.draw(st.integers(0, len(wire)))
    borders = sorted({0, cut, *data.draw(st.lists(st.integers(0, cut), max_size=6))})
    transcript = Transcript()
    passed = b"".join(transcript.feed(wire[start:end]) for start, end in pairwise(borders))
    events = [event + b"\n\n" for delta in deltas for event in delta.events()]
    assert passed == b"".join(events[:len(passed.split(b"\n\n")) - 1]), "whole events, in order, and nothing else"
    told = Told(NUM_CHOICES)
    told.replay(transcript.kept_blocks())
    told.worker_lost(None)
    _compare(told, deltas, wire[:cut])


def _compare(told: Told, deltas: list[Delta], came: bytes) -> None:
    at = 0
    ids: dict[int, list[int]] = {choice: [] for choice in range(NUM_CHOICES)}
    chars, roles, ended = dict.fromkeys(ids, 0), dict.fromkeys(ids, False), dict.fromkeys(ids, False)
    for delta in deltas:
        at += len(encode_told(delta.choice, len(delta.events()), delta.token_ids))
        is_whole = at <= len(came)
        for number, event in enumerate(delta.events()):
            at += len(event) + 2
            is_whole = at <= len(came)
            if is_whole and number == 0 and delta.has_role:
                roles[delta.choice] = True
        if is_whole:
            ids[delta.choice] += delta.token_ids
            chars[delta.choice] += len(delta.text) if delta.events() else 0
            ended[delta.choice] |= delta.is_last
    assert [choice.token_ids for choice in told.choices] == list(ids.values())
    assert [choice.sent_chars for choice in told.choices] == list(chars.values())
    assert [choice.has_role for choice in told.choices] == list(roles.values())
    assert told.unfinished == [choice for choice, is_ended in ended.items() if not is_ended]


PIECES = [b": ids 0 1 7\n\n", b'data: {"a": 1}\n\n', b"data: x\n\n", b"\n", b": note\n\n", b"data: [DONE]\n\n",
          b": ids ",
          b'data: {"error":{"code":"worker_failed"}}\n\n', b'data: {"error":{"code":"invalid_request"}}\n\n']


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join), max_size=8), st.data())
def test_the_shortcut_passes_what_the_long_way_would(chunks: list[bytes], data: st.DataObject) -> None:
    """Also when a chunk that could have taken it does not, as when a client is slow."""
    long, short = Transcript(), Transcript()
    for chunk in chunks:
        passing = short.passing_whole(chunk)
        if passing is None or not data.draw(st.booleans()):
            assert short.feed(chunk) == long.feed(chunk)
        else:
            short.keep(chunk)
            assert passing == long.feed(chunk)
        assert (short.lost, short.refused, short.is_kept) == (long.lost, long.refused, long.is_kept)
        if long.lost:
            break
    assert short.kept_blocks() == long.kept_blocks()


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join), max_size=3 * UNSETTLED_MAX),
       st.booleans(), st.data())
def test_what_took_the_shortcut_is_remembered_as_if_it_had_not(chunks: list[bytes], with_transcript: bool,
                                                               data: st.DataObject) -> None:
    sent: list[bytes] = []
    long, long_tail = Transcript(), StreamTail()
    short, tail = Transcript() if with_transcript else None, StreamTail()
    is_slow = data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks)))

    def send(passing: bytes, framed: bytes | None) -> bool:
        if not is_slow[at]:
            sent.append(passing if framed is None else framed.removeprefix(b"%x\r\n" % len(passing))[:-2])
        return not is_slow[at]

    shortcut = Shortcut(send, tail, short)
    for at, chunk in enumerate(chunks):
        takers = shortcut.takers
        if not (takers.take_framed(b"%x\r\n%b\r\n" % (len(chunk), chunk)) if at % 3 else takers.take(chunk)):
            shortcut.settle()
            passing = chunk if short is None else short.feed(chunk)
            if passing:
                tail.feed(passing)
                sent.append(passing)
        long_tail.feed(long.feed(chunk) if with_transcript else chunk)
        if long.lost:
            break
    shortcut.settle()
    assert b"".join(sent) == tail.tail() == long_tail.tail()
    assert tail.total_bytes == long_tail.total_bytes
    assert short is None or short.kept_blocks() == long.kept_blocks()


def test_usual_chunks_take_the_shortcut() -> None:
    delta = Delta(0, [5], "x", has_role=True, is_last=False)
    events = b"".join(event + b"\n\n" for event in delta.events())
    assert Transcript().passing_whole(delta.written()) == events
    assert Transcript().passing_whole(delta.written() * 2) == events * 2
    assert Transcript().passing_whole(events) == events
    assert Transcript().passing_whole(encode_told(0, 0, [1])) == b""


@given(st.integers(0, 99), st.integers(0, 9), st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_told_tokens_round_trip(choice: int, num_events: int, token_ids: list[int]) -> None:
    line = encode_told(choice, num_events, token_ids)
    assert decode_told(line.removesuffix(b"\n\n")) == ToldTokens(choice, num_events, token_ids)


@pytest.mark.parametrize("block", [b"", b": ids", b": ids 1 2", b": ids a 1 3", b": ids 1 1 3,", b": ids 1 1 -3",
                                   b": keep-alive", b'data: {": ids 1 1 3"}'])
def test_other_blocks_tell_no_tokens(block: bytes) -> None:
    assert decode_told(block) is None


def test_beyond_the_limit_everything_still_passes_and_nothing_is_kept() -> None:
    delta = Delta(0, [5], "x" * 1000, has_role=False, is_last=False)
    transcript, passed = Transcript(), 0
    for _ in range(KEPT_BYTES // 1000 + 1):
        passed += len(transcript.feed(delta.written()))
    assert not transcript.is_kept
    assert transcript.kept_blocks() == []
    assert passed == (KEPT_BYTES // 1000 + 1) * (len(delta.events()[0]) + 2)


def test_one_event_larger_than_the_limit_passes_in_parts() -> None:
    delta = Delta(0, [5], "y" * (KEPT_BYTES + 10), has_role=False, is_last=False)
    wire = delta.written() + Delta(0, [6], "z", has_role=False, is_last=True).written()
    transcript = Transcript()
    passed = b"".join(transcript.feed(wire[at:at + 300_000]) for at in range(0, len(wire), 300_000))
    assert passed == b"".join(event + b"\n\n" for event in (
        *delta.events(), *Delta(0, [6], "z", has_role=False, is_last=True).events()))
    assert not transcript.is_kept


@pytest.mark.parametrize(("code", "is_lost"), [("worker_failed", True), ("worker_draining", True),
                                               ("internal_error", True), ("invalid_request", False)])
def test_a_worker_that_gives_up_is_not_quoted_and_a_refusal_is(code: str, *, is_lost: bool) -> None:
    error = b"data: " + orjson.dumps({"error": {"message": "m", "type": "t", "param": None, "code": code}}) + b"\n\n"
    transcript = Transcript()
    assert transcript.feed(error) == (b"" if is_lost else error)
    assert (transcript.lost, transcript.refused) == (is_lost, not is_lost)


def test_an_event_of_another_kind_is_not_understood() -> None:
    with pytest.raises(ValueError, match="another kind"):
        Told(1).replay([b"event: message_start\ndata: {}"])


def test_the_ending_has_usage_once_and_only_where_it_was_asked_for() -> None:
    first = Delta(0, [1, 2], "a", has_role=True, is_last=False)
    last = Delta(0, [3], "b", has_role=False, is_last=True)
    blocks = (first.written() + last.written()).split(b"\n\n")
    told = Told(1)
    told.replay(blocks)
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
             "prompt_tokens_details": {"cached_tokens": 4}}
    chunk = b"data: " + orjson.dumps({**HEAD, "choices": [], "usage": usage})
    ending = told.ending(prompt_tokens=7, cached_tokens=4, include_usage=True)
    assert ending == chunk + b"\n\ndata: [DONE]\n\n"
    assert told.ending(prompt_tokens=7, cached_tokens=4, include_usage=False) == b"data: [DONE]\n\n"
    told.replay([chunk])
    assert told.ending(prompt_tokens=7, cached_tokens=4, include_usage=True) == b"data: [DONE]\n\n"
