"""The soak's clients judge what they get: right answers pass, and each kind of wrong one is a problem."""

from __future__ import annotations

import asyncio
import random

import pytest

from loadtests.soak import memory_verdict
from loadtests.soak_client import Plan, Tally, drive
from loadtests.soak_fleet import Held
from loadtests.soak_plans import MIX, http, kinds, stub_plans, tiny_bodies, tiny_plans
from loadtests.soak_worker import answer_words

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR = b'{"error":{"message":"x","type":"x","param":null,"code":"%b"}}'


def sized(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def chunks(*parts: bytes) -> bytes:
    return STREAM + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def events(*texts: bytes, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text for text in texts) + end


async def judged(plan: Plan, answer: bytes, *, then_close: bool = False) -> Tally:
    """What a client makes of this answer."""
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        if then_close:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    tally = Tally()
    async with server, asyncio.timeout(20):
        await drive(server.sockets[0].getsockname()[1], iter([plan]), tally, num_lanes=1, seed=1)
    return tally


WHOLE = Plan("whole", http(b"{}"), False, b"one two")
STREAMED = Plan("stream", http(b"{}"), True, b"one two")
WRONG = Plan("no json", http(b"{}"), False, refusals=(400,))
TORN = events(b"one", b" two")

RIGHT_ANSWERS = [
    (WHOLE, sized(b'{"choices":[{"message":{"content":"one two"}}]}'), "whole ok"),
    (STREAMED, chunks(TORN), "stream ok"), (STREAMED, chunks(TORN[:30], TORN[30:]), "stream ok"),
    (STREAMED, chunks(b": keep-alive\n\n", TORN), "stream ok"),
    (WRONG, sized(ERROR % b"invalid_request", b"400 Bad Request"), "no json refused 400"),
    (WHOLE, sized(ERROR % b"no_worker", b"503 x"), "whole documented error"),
    (STREAMED, chunks(events(b"one", end=b"event: error\ndata: " + ERROR % b"worker_failed" + b"\n\n")),
     "stream documented error"),
]
WRONG_ANSWERS = [
    (WHOLE, sized(b'{"choices":[{"message":{"content":"one tow"}}]}')), (WHOLE, sized(b"{}")),
    (WHOLE, sized(ERROR % b"internal_error", b"500 x")), (WHOLE, sized(ERROR % b"invalid_request", b"400 x")),
    (STREAMED, chunks(events(b"one", b"two"))), (STREAMED, chunks(events(b"one", b" two", end=b""))),
    (STREAMED, chunks(events(b"one", b" two", b" two"))), (STREAMED, chunks(events(b" two"))),
    (WRONG, sized(b"{}")), (WRONG, sized(b"{}", b"400 Bad Request")), (WRONG, sized(ERROR % b"x", b"404 x")),
]


@pytest.mark.parametrize(("plan", "answer", "outcome"), RIGHT_ANSWERS, ids=range(len(RIGHT_ANSWERS)))
async def test_a_right_answer_passes(plan: Plan, answer: bytes, outcome: str) -> None:
    tally = await judged(plan, answer)
    assert (dict(tally.outcomes), tally.num_problems) == ({outcome: 1}, 0)


@pytest.mark.parametrize(("plan", "answer"), WRONG_ANSWERS, ids=range(len(WRONG_ANSWERS)))
async def test_a_wrong_answer_is_a_problem(plan: Plan, answer: bytes) -> None:
    tally = await judged(plan, answer)
    assert tally.num_problems == tally.num_done == 1


@pytest.mark.parametrize("answer", [b"", OK, STREAM + b"5\r\nhello"])
async def test_an_answer_that_breaks_off_is_a_problem(answer: bytes) -> None:
    tally = await judged(STREAMED, answer, then_close=True)
    assert "ended after" in tally.problems[0]


def test_the_plans_are_the_mix_and_each_knows_its_answer() -> None:
    plans = list(stub_plans(2000, seed=1))
    assert {plan.kind for plan in plans} == {*MIX, "stream", "whole"}
    assert [plan.data for plan in plans] == [plan.data for plan in stub_plans(2000, seed=1)]
    for number, plan in enumerate(plans):
        if not plan.refusals:
            assert plan.expected == b"".join(answer_words(number, is_large=plan.kind == "slow reader"))
            assert b"#%d" % number in plan.data.replace(b"\r\n", b"") or plan.kind == "chunked"
    bodies = tiny_bodies("tiny", 4, 1)
    assert all(b"/v1/chat" not in plan.data for plan in tiny_plans(bodies, [b"a", b"b", b"c", b"d"], 2000, 1))
    assert len(list(kinds(random.Random(1), 7))) == 7


def test_growing_memory_is_not_flat() -> None:
    def held(mib: float, at_s: int) -> Held:
        return Held(at_s, int(mib * 2**20), 5, 5)

    assert memory_verdict([held(200, at) for at in range(20)])[0]
    assert not memory_verdict([held(200 + 3 * at, at) for at in range(20)])[0]
    assert memory_verdict([held(100 + 100 * (at > 3), at) for at in range(20)])[0], "warming up is no growth"
