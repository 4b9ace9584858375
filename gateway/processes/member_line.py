"""The supervisor's end of the line to one process: asks for its metrics, answers for the whole gateway's, and tells
it which workers were added and removed.

Owns: the socket and the question under way. A process that does not answer in time is taken as it last was.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from gateway.processes.metric_sum import Snapshot
from gateway.shared.frames import HEAD, Word, frame, read_head

ANSWER_TIMEOUT_S = 0.5
TOLD_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Answers:
    """What a supervisor does for any of its processes. `keep` is given each snapshot of this one; `whole` makes the
    text for all; `change` has all of them change their workers; `fleet` is what has been changed so far."""

    keep: Callable[[Snapshot], None]
    whole: Callable[[], Awaitable[bytes]]
    change: Callable[[bytes], Awaitable[bytes]]
    fleet: Callable[[], bytes]


class MemberLine:
    """Begins to listen at once."""

    def __init__(self, line: socket.socket, answers: Answers) -> None:
        self._line = line
        self._supervisor = answers
        self._told: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._asked: asyncio.Future[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._serve())
        self._answers: set[asyncio.Task[None]] = set()

    async def ask(self) -> None:
        """Returns once `keep` has a fresh snapshot, or the time for one is over."""
        if self._writer is None:
            return
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self._writer.write(frame(Word.YOURS, 0))
        await asyncio.wait([self._asked], timeout=ANSWER_TIMEOUT_S)

    async def tell_fleet(self) -> bool:
        """Returns once the process has taken it in; False when it has not in time."""
        if self._writer is None:
            return True  # it is told as soon as it listens
        number, taken_in = next(self._numbers), asyncio.get_running_loop().create_future()
        self._told[number] = taken_in
        self._writer.write(frame(Word.FLEET, number, self._supervisor.fleet()))
        done, _ = await asyncio.wait([taken_in, self._task], timeout=TOLD_TIMEOUT_S,
                                     return_when=asyncio.FIRST_COMPLETED)
        del self._told[number]
        return bool(done)

    async def close(self) -> None:
        """The process has ended: read what it still said, and hang up."""
        await asyncio.wait([self._task], timeout=ANSWER_TIMEOUT_S)
        for task in (self._task, *self._answers):
            task.cancel()
        await asyncio.gather(self._task, *self._answers, return_exceptions=True)
        if self._writer is None:
            self._line.close()
        else:
            self._writer.close()

    async def _serve(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._line)
        self._writer.write(frame(Word.FLEET, 0, self._supervisor.fleet()))
        try:
            while True:
                num_bytes, word, number = read_head(await reader.readexactly(HEAD.size))
                payload = await reader.readexactly(num_bytes)
                if word is Word.YOURS_IS:
                    self._supervisor.keep(orjson.loads(payload))
                    if self._asked is not None and not self._asked.done():
                        self._asked.set_result(None)
                elif word is Word.WHOLE:
                    self._answer(self._writer, Word.WHOLE_IS, number, self._supervisor.whole())
                elif word is Word.CHANGE:
                    self._answer(self._writer, Word.CHANGE_IS, number, self._supervisor.change(payload))
                elif word is Word.FLEET_IS and (taken_in := self._told.get(number)) is not None:
                    taken_in.set_result(None)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return  # it has ended, or speaks another language: its end will be seen by others

    def _answer(self, writer: asyncio.StreamWriter, word: Word, number: int, finding: Awaitable[bytes]) -> None:
        async def answer() -> None:
            writer.write(frame(word, number, await finding))

        task = asyncio.create_task(answer())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
