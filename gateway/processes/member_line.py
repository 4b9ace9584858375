"""The supervisor's end of the line to one process: asks for its metrics, answers for the whole gateway's.

Owns: the socket and the question under way. A process that does not answer in time is taken as it last was.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import orjson

from gateway.processes.metric_sum import Snapshot
from gateway.shared.frames import HEAD, Word, frame, read_head

ANSWER_TIMEOUT_S = 0.5


class MemberLine:
    """`keep` is given each snapshot; `whole` makes the text for all processes."""

    def __init__(self, line: socket.socket, *, keep: Callable[[Snapshot], None],
                 whole: Callable[[], Awaitable[bytes]]) -> None:
        self._line = line
        self._keep = keep
        self._whole = whole
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
        try:
            while True:
                num_bytes, word, number = read_head(await reader.readexactly(HEAD.size))
                payload = await reader.readexactly(num_bytes)
                if word is Word.YOURS_IS:
                    self._keep(orjson.loads(payload))
                    if self._asked is not None and not self._asked.done():
                        self._asked.set_result(None)
                elif word is Word.WHOLE:
                    task = asyncio.create_task(self._answer(number, self._writer))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return  # it has ended, or speaks another language: its end will be seen by others

    async def _answer(self, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Word.WHOLE_IS, number, await self._whole()))
