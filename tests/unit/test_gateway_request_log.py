"""The request log: everybody is accounted for, once and in order; a few in pieces, many together."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator

import orjson
import pytest

from gateway.server.request_log import ENOUGH, FLUSH_S, MANY, PIECE, RequestLog
from gateway.server.request_record import RequestRecord
from worker.protocol.logs import configure_logging


@pytest.fixture
def lines() -> Iterator[Callable[[], list[list[str]]]]:
    """The request ids in each write since the last look."""
    writes: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    configure_logging(stream=Stream())
    def taken() -> list[list[str]]:
        seen, writes[:] = [*writes], []
        return [[orjson.loads(line)["request_id"] for line in text.splitlines()] for text in seen]

    yield taken
    configure_logging()


def names(num: int) -> list[str]:
    return [f"r{number}" for number in range(num)]


def add(log: RequestLog, num: int) -> None:
    for name in names(num):
        log.add(RequestRecord(name, "/v1/chat/completions"), 0.001)


class Counted:
    """Who has been accounted for; `done` once that is `expected` of them."""

    def __init__(self, expected: int) -> None:
        self.names: list[str] = []
        self.done = asyncio.Event()
        self._expected = expected

    def __call__(self, record: RequestRecord, _: float) -> None:
        self.names.append(record.request_id)
        if len(self.names) == self._expected:
            self.done.set()


async def test_a_few_are_written_in_pieces_with_turns_for_others_between(
        lines: Callable[[], list[list[str]]]) -> None:
    log = RequestLog("test", counted := Counted(ENOUGH))

    add(log, ENOUGH)
    assert counted.names == []
    for turn in range(1, ENOUGH // PIECE + 1):
        await asyncio.sleep(0)
        assert counted.names == names(turn * PIECE)

    assert [len(piece) for piece in lines()] == [PIECE] * (ENOUGH // PIECE)


async def test_many_are_written_together(lines: Callable[[], list[list[str]]]) -> None:
    log = RequestLog("test", counted := Counted(MANY))

    add(log, MANY)
    await asyncio.sleep(0)

    assert counted.names == names(MANY)
    assert lines() == [names(MANY)]


async def test_what_waits_is_written_after_a_while(lines: Callable[[], list[list[str]]]) -> None:
    log = RequestLog("test", counted := Counted(PIECE + 1))

    add(log, PIECE + 1)
    await counted.done.wait()

    assert lines() == [names(PIECE + 1)[:PIECE], names(PIECE + 1)[PIECE:]]


async def test_and_so_is_what_comes_after_that(lines: Callable[[], list[list[str]]]) -> None:
    log = RequestLog("test", counted := Counted(2))

    add(log, 1)
    await asyncio.sleep(2 * FLUSH_S)
    add(log, 1)
    await counted.done.wait()

    assert lines() == [["r0"], ["r0"]]


async def test_flush_leaves_nothing_for_later(lines: Callable[[], list[list[str]]]) -> None:
    log = RequestLog("test", counted := Counted(ENOUGH + 1))

    add(log, ENOUGH + 1)
    await asyncio.sleep(0)
    log.flush()
    assert counted.names == names(ENOUGH + 1)
    await asyncio.sleep(2 * FLUSH_S)

    assert counted.names == names(ENOUGH + 1)
    assert [name for piece in lines() for name in piece] == names(ENOUGH + 1)
