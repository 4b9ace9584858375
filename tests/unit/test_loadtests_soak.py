"""The soak's clients judge what they get: right answers pass, and each kind of wrong one is a problem."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest

from loadtests.local_stack import Child, start
from loadtests.soak import memory_verdict, verdict
from loadtests.soak_client import Plan, Tally, drive
from loadtests.soak_fleet import PORTS, Held, running_fleet, steady_ports
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
    def is_flat(mib_at: Callable[[int], float]) -> bool:
        return memory_verdict([Held(at, int(mib_at(at) * 2**20), 5, 5, requests=400 * at) for at in range(100)])[0]

    assert is_flat(lambda at: 200 + at % 4)
    assert is_flat(lambda at: 100 + 100 * (at >= 10)), "caches fill in the first tenth"
    assert not is_flat(lambda at: 100 + 100 * (at >= 40))
    assert not is_flat(lambda at: 100 + 0.08 * at), "6 of 101 MiB in the judged part of a run"


def test_a_run_too_short_to_judge_says_so() -> None:
    is_flat, figures = memory_verdict([Held(at, at << 30, 5, 5, requests=at) for at in range(8)])
    assert is_flat
    assert not figures
    part = {"part": "A", "ok": False, "requests": 7, "asked_for": 9, "seconds": 1.0, "worker_kills": 1,
            "memory": figures, "checks": {"memory is flat": True, "no task is left": False}}
    assert "FAILED: 7 of 9" in verdict(part)
    assert "too short to judge" in verdict(part)
    assert "FAILED no task is left" in verdict(part)
    assert "flat" not in verdict(part)


def test_ports_are_free_apart_and_not_those_of_outgoing_connections() -> None:
    ports = steady_ports(20)
    assert len(set(ports)) == 20
    assert set(ports) <= set(PORTS)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in {port for _ in range(20) for port in steady_ports(5)}


async def test_a_fleet_whose_port_was_taken_starts_on_others(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[socket.socket] = []

    def start_worker(port: int, tokens: dict[str, str]) -> Child:
        if not taken:
            taken.append(socket.create_server(("127.0.0.1", port)))
        return start(["loadtests.soak_worker", f"--port={port}"], url=f"http://127.0.0.1:{port}", env=tokens)

    async with running_fleet(start_worker, num_workers=1) as fleet:
        assert fleet.load() == {"inflight": 0, "queued": 0}
    taken[0].close()
    assert "is tried again" in capsys.readouterr().err
