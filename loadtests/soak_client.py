"""The near end of the soak: clients of every kind, as cheap as they can be, each of whose answers is read and judged.

A lane sends one request after the other over a kept connection, and opens another when that one has ended.
Must never: take a request for answered whose text is not the one that was expected, or forget one.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import orjson

STREAM_END = b"0\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HANG_S = 90.0
SWEEP_S = 5.0
PROBLEMS_MAX = 50
# What a request that is right may end in when workers are killed under it.
DOCUMENTED = frozenset(("worker_failed", "worker_timeout", "no_worker", "queue_full"))
_TEXT = re.compile(rb'"(?:content|text)":"((?:[^"\\]|\\.)*)"')
_ERROR = re.compile(rb'"code":"(\w+)"')


@dataclass(slots=True)
class Plan:
    """One request. `expected`: the text of the answer; `refusals`: statuses that are right for one that is wrong."""

    kind: str
    data: bytes
    is_stream: bool
    expected: bytes | None = None
    refusals: tuple[int, ...] = ()


@dataclass
class Tally:
    """What came of it all."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    num_done: int = 0

    def done(self, plan: Plan, outcome: str) -> None:
        """Count one request."""
        self.num_done += 1
        self.outcomes[f"{plan.kind} {outcome}"] += 1

    def problem(self, plan: Plan, what: str) -> None:
        """Count a request whose end nothing documents."""
        self.done(plan, "PROBLEM")
        self.num_problems += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"{plan.kind}: {what}")


class _Wire(asyncio.Protocol):
    """One connection of a lane, until the lane lets go of it."""

    def __init__(self, lane: Lane) -> None:
        self.lane: Lane | None = lane

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.lane is not None:
            self.lane.received(data)

    def connection_lost(self, reason: Exception | None) -> None:
        if self.lane is not None:
            self.lane.lost()


class Lane:
    """One client after the other."""

    def __init__(self, port: int, plans: Iterator[Plan], tally: Tally, rng: random.Random) -> None:
        self._port = port
        self._plans = plans
        self._tally = tally
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._wire: _Wire | None = None
        self._plan: Plan | None = None
        self._buffer = bytearray()
        self._num_pauses = 0
        self.began_at = 0.0
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.is_ending = False

    def next(self) -> None:
        """Begin the next request; none left ends the lane."""
        self._plan = None if self.is_ending else next(self._plans, None)
        if self._plan is None:
            self._drop()
            if not self.ended.done():
                self.ended.set_result(None)
            return
        self._buffer.clear()
        self._num_pauses = 0
        self.began_at = time.monotonic()
        if self._wire is None:
            self._loop.create_task(self._connect(self._plan))
        else:
            self._send(self._plan)

    async def _connect(self, plan: Plan) -> None:
        try:
            _, self._wire = await self._loop.create_connection(lambda: _Wire(self), "127.0.0.1", self._port)
        except OSError as error:
            self._tally.problem(plan, f"could not connect: {error}")
            await asyncio.sleep(0.1)
            self.next()
            return
        self._send(plan)

    def _send(self, plan: Plan) -> None:
        assert self._wire is not None
        transport, kind = self._wire.transport, plan.kind
        if kind == "slow body":
            third = len(plan.data) // 3
            transport.write(plan.data[:third])
            self._later(0.02, plan, lambda: transport.write(plan.data[third:2 * third]))
            self._later(0.05, plan, lambda: transport.write(plan.data[2 * third:]))
            return
        if kind == "leave in the head":
            transport.write(plan.data[:len(plan.data) // 3])
            self._leave(plan)
            return
        transport.write(plan.data)
        if kind == "half close":
            transport.write_eof()
        elif kind == "leave at once":
            self._leave(plan)
        elif kind == "leave waiting":
            self._later(self._rng.random() * 0.008, plan, lambda: self._leave(plan))

    def _later(self, seconds: float, plan: Plan, act: Callable[[], None]) -> None:
        wire = self._wire

        def if_still() -> None:
            if self._plan is plan and self._wire is wire and wire is not None and not wire.transport.is_closing():
                act()

        self._loop.call_later(seconds, if_still)

    def _leave(self, plan: Plan) -> None:
        self._drop(hard=self._rng.random() < 0.5)
        self._tally.done(plan, "left")
        self._loop.call_soon(self.next)

    def _drop(self, *, hard: bool = False) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.lane = None
            wire.transport.abort() if hard else wire.transport.close()

    def received(self, data: bytes) -> None:
        """Bytes of the answer."""
        plan = self._plan
        if plan is None:
            return  # between two requests: what comes then is seen by the next one
        self._buffer += data
        if plan.kind == "leave in mid-stream" and len(self._buffer) > 100:
            self._leave(plan)
            return
        if plan.kind == "slow reader" and self._num_pauses < 3:
            self._pause(plan)
        if self._buffer.startswith(INTERIM):
            del self._buffer[:len(INTERIM)]
        if self._is_whole():
            self._judge(plan)

    def _pause(self, plan: Plan) -> None:
        assert self._wire is not None
        transport = self._wire.transport
        self._num_pauses += 1
        transport.pause_reading()
        self._loop.call_later(0.08, lambda: None if transport.is_closing() else
                              transport.resume_reading())

    def _is_whole(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._buffer[:end]).lower()
        at = head.find(b"content-length:")
        if at < 0:
            return self._buffer.endswith(STREAM_END)
        return len(self._buffer) >= end + 4 + int(head[at + 15:].split(b"\r\n", 1)[0])

    def lost(self) -> None:
        """The gateway has closed the connection."""
        self._wire = None
        plan = self._plan
        if plan is not None:
            self._tally.problem(plan, f"the connection ended after {bytes(self._buffer[:200])!r}")
            self._plan = None
            self._loop.call_soon(self.next)

    def _judge(self, plan: Plan) -> None:
        answer = bytes(self._buffer)
        self._plan = None
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(answer[9:12])
        if status == 200 and plan.expected is not None:
            self._judge_text(plan, body)
        elif status in plan.refusals and _ERROR.search(body):
            self._tally.done(plan, f"refused {status}")
        else:
            code = _code(body)
            if plan.expected is not None and code in DOCUMENTED:
                self._documented(plan, f"{status} {code}")
            else:
                self._tally.problem(plan, f"{answer[:300]!r}")
        if plan.kind in ("half close", "http/1.0") or b"onnection: close" in head:
            self._drop()
        self.next()

    def _judge_text(self, plan: Plan, body: bytes) -> None:
        if any(b"".join(_TEXT.findall(text)) == plan.expected and (not plan.is_stream or b"data: [DONE]" in text)
               for text in (body, _unchunked(body))):  # most bodies can be read through their chunk framing
            self._tally.done(plan, "ok")
            return
        if b"event: error" in body and (code := _code(body)) in DOCUMENTED:
            self._documented(plan, f"in mid-stream {code}")
            return
        self._tally.problem(plan, f"expected {(plan.expected or b'')[:80]!r}, got {_unchunked(body)[-400:]!r}")

    def _documented(self, plan: Plan, what: str) -> None:
        self._tally.errors[what] += 1
        self._tally.done(plan, "documented error")

    def check_hang(self, now: float) -> None:
        """Give up on an answer that does not come."""
        if self._plan is not None and now - self.began_at > HANG_S:
            plan, self._plan = self._plan, None
            self._tally.problem(plan, f"no whole answer in {HANG_S:g} s: {bytes(self._buffer[:200])!r}")
            self._drop(hard=True)
            self.next()


async def drive(port: int, plans: Iterator[Plan], tally: Tally, *, num_lanes: int, seed: int,
                is_over: Callable[[], bool] = lambda: False) -> None:
    """Send all plans over so many lanes. No request begins once it `is_over`."""
    lanes = [Lane(port, plans, tally, random.Random(f"{seed} {number}")) for number in range(num_lanes)]
    for lane in lanes:
        lane.next()
    ends = asyncio.gather(*(lane.ended for lane in lanes))
    while not ends.done():
        await asyncio.wait([ends], timeout=SWEEP_S)
        now = time.monotonic()
        for lane in lanes:
            lane.check_hang(now)
            lane.is_ending = is_over()


def _unchunked(body: bytes) -> bytes:
    """The body without its chunk framing; as it is when it has none."""
    text, at = [], 0
    while (end := body.find(b"\r\n", at)) > 0:
        try:
            size = int(body[at:end], 16)
        except ValueError:
            return body
        text.append(body[end + 2:end + 2 + size])
        at = end + 4 + size
    return b"".join(text)


def _code(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        found = _ERROR.search(_unchunked(body))
        return found[1].decode() if found else ""
