"""Streams that do not begin, answers that never end: what a second worker and the limits make of them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import (
    Behaviour,
    Seen,
    StubWorker,
    answer,
    events_of,
    never_answer,
    open_stream,
    refuse,
    running,
)


def late(seconds: float) -> Behaviour:
    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await answer(stub, request, seen)

    return behave


async def trickle(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A stream that goes on and on."""
    response = await open_stream(request, {})
    while True:
        await response.write(events_of(seen)[0])
        await asyncio.sleep(0.02)


class _Shared:
    """One script for both stubs."""

    def __init__(self, *script: Behaviour) -> None:
        self._script = list(script)

    def __bool__(self) -> bool:
        return bool(self._script)

    def popleft(self) -> Behaviour:
        return self._script.pop(0)


async def asked(*stubs: StubWorker) -> list[Seen]:
    return [seen for stub in stubs for seen in stub.seen]


def pair(*script: Behaviour) -> tuple[StubWorker, StubWorker]:
    stubs = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    for stub in stubs:
        stub.next_behaviours = _Shared(*script)  # type: ignore[assignment]
    stubs[1].next_behaviours = stubs[0].next_behaviours
    return stubs


async def idle(gateway: GatewayUnderTest, *, num_workers: int = 2) -> bool:
    return all([(await gateway.worker(index))["inflight"] == 0 for index in range(num_workers)])


async def test_the_second_worker_answers_when_the_first_is_stuck() -> None:
    stubs = pair(never_answer)
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), hedge_after_s=0.1) as gateway:
        await gateway.until_exact(num_workers=2)
        got = await gateway.chat(stream=True)
        assert (got.status, got.body.endswith(b"data: [DONE]\n\n")) == (200, True)
        stuck, _ = sorted(stubs, key=lambda stub: stub.url != _url_of_stuck(stubs))
        await asyncio.wait_for(stuck.seen[0].left_early.wait(), 5)
        answered = next(stub for stub in stubs if stub is not stuck)
        assert got.headers["x-headstart-worker"] == answered.url.removeprefix("http://")
        assert await gateway.metric('headstart_hedges_total{outcome="won"}') == 1
        assert await idle(gateway)


def _url_of_stuck(stubs: tuple[StubWorker, StubWorker]) -> str:
    """The one whose request was not answered: it took no prompt into its cache."""
    return next(stub.url for stub in stubs if stub.seen and not stub.blocks)


async def test_the_first_worker_keeps_its_request_when_it_begins_first() -> None:
    stubs = pair(late(0.4), never_answer)
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), hedge_after_s=0.1) as gateway:
        await gateway.until_exact(num_workers=2)
        assert (await gateway.chat(stream=True)).status == 200
        assert len(await asked(*stubs)) == 2
        left = [seen.left_early for seen in await asked(*stubs)]
        await gateway.until(lambda: _any_set(left), "the hedge is cut")
        assert await gateway.metric('headstart_hedges_total{outcome="lost"}') == 1
        assert await idle(gateway)


async def _any_set(events: list[asyncio.Event]) -> bool:
    return any(event.is_set() for event in events)


async def test_a_hedge_that_fails_costs_nothing() -> None:
    stubs = pair(late(0.4), refuse(500, "internal_error"))
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), hedge_after_s=0.1) as gateway:
        await gateway.until_exact(num_workers=2)
        assert (await gateway.chat(stream=True)).status == 200
        assert await gateway.metric('headstart_hedges_total{outcome="lost"}') == 1


async def test_only_streams_are_hedged_only_so_many_and_only_when_asked_to() -> None:
    for settings, stream, num_asked in (({"hedge_after_s": 0.05}, False, 1), ({}, True, 1)):
        stubs = pair(late(0.3))
        async with running(*stubs), running_gateway(*(stub.url for stub in stubs), **settings) as gateway:
            await gateway.until_exact(num_workers=2)
            assert (await gateway.chat(stream=stream)).status == 200
            assert len(await asked(*stubs)) == num_asked
    stubs = pair(*[late(0.5)] * 6)
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), hedge_after_s=0.1,
                                                max_hedges=2) as gateway:
        await gateway.until_exact(num_workers=2)
        await asyncio.gather(*(gateway.chat(f"number {number}", stream=True) for number in range(4)))
        assert len(await asked(*stubs)) == 6
        assert await gateway.metric('headstart_hedges_total{outcome="limit"}') == 2
        assert await idle(gateway)


async def test_a_client_that_leaves_takes_both_along() -> None:
    stubs = pair(never_answer, never_answer)
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), hedge_after_s=0.05) as gateway:
        await gateway.until_exact(num_workers=2)
        task = asyncio.create_task(gateway.chat(stream=True))
        await gateway.until(lambda: _both_asked(stubs), "both are asked")
        task.cancel()
        for stub in stubs:
            await asyncio.wait_for(stub.seen[0].left_early.wait(), 5)
        await gateway.until(lambda: idle(gateway), "nothing is booked")


async def _both_asked(stubs: tuple[StubWorker, StubWorker]) -> bool:
    return all(stub.seen for stub in stubs)


async def test_the_whole_answer_has_a_limit_too() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, total_timeout_s=0.5) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(trickle)
        got = await gateway.chat(stream=True)
        assert got.status == 200
        assert b"event: error" in got.body
        assert b"worker_timeout" in got.body
        await asyncio.wait_for(stub.seen[-1].left_early.wait(), 5)
        stub.next_behaviours.append(never_answer)
        whole = await gateway.chat()
        assert (whole.status, whole.error["code"]) == (504, "worker_timeout")
        assert (await gateway.chat(stream=True)).body.endswith(b"data: [DONE]\n\n")
        assert await idle(gateway, num_workers=1)
