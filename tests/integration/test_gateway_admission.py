"""Places, queue, limits and deadlines over real sockets, in front of a worker that answers when told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.admission.budget import Window, window_end
from tests.integration.test_gateway_tenants import KEY_A, KEY_B, as_key, keys_file
from tests.support.gateway_in_process import WORKER_TOKEN, Answer, GatewayUnderTest, running_gateway
from tests.support.stub_worker import Behaviour, Seen, StubWorker, answer, running
from worker.protocol.internal_request import JSON_BYTES_HEADER, TENANT_HEADER


class Gate:
    """A behaviour that answers once it is opened, one request for each opening."""

    def __init__(self) -> None:
        self._may = asyncio.Semaphore(0)

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self._may.release()

    def behaviour(self) -> Behaviour:
        async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
            await self._may.acquire()
            return await answer(stub, request, seen)

        return behave


class Holding:
    """A gateway whose one worker holds every request at a gate."""

    def __init__(self, gateway: GatewayUnderTest, stub: StubWorker, gate: Gate) -> None:
        self.gateway, self.stub, self.gate = gateway, stub, gate
        self.sent: list[asyncio.Task[Answer]] = []

    def send(self, text: str = "hi", **more: Any) -> asyncio.Task[Answer]:
        task = asyncio.create_task(self.gateway.chat(text, **more))
        self.sent.append(task)
        return task

    async def until_waiting(self, number: int) -> None:
        async def waits() -> bool:
            return self.gateway.gateway.state.admission.num_waiting == number

        await self.gateway.until(waits, f"{number} wait")

    async def until_seen(self, number: int) -> None:
        async def seen() -> bool:
            return len(self.stub.seen) == number

        await self.gateway.until(seen, f"{number} at the worker")

    async def rejected(self, reason: str) -> float:
        return await self.gateway.metric(f'headstart_rejected_total{{reason="{reason}"}}')

    def texts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies()]

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(seen.body[:int(seen.headers[JSON_BYTES_HEADER])]) for seen in self.stub.seen]


@pytest.fixture
async def start() -> Any:
    """Starts a Holding; at the end everything is let through, and no place may be left taken."""
    stack = contextlib.AsyncExitStack()
    holdings = []

    async def begin(**settings: Any) -> Holding:
        stub, gate = StubWorker(worker_token=WORKER_TOKEN), Gate()
        await stack.enter_async_context(running(stub))
        stub.next_behaviours.extend([gate.behaviour()] * 100)
        settings = {"max_inflight_per_worker": 1, **settings}
        gateway = await stack.enter_async_context(running_gateway(stub.url, **settings))
        await gateway.until_exact()
        holdings.append(Holding(gateway, stub, gate))
        return holdings[-1]

    async with stack:
        yield begin
        for held in holdings:
            held.gate.open(100)
            await asyncio.gather(*held.sent, return_exceptions=True)
            admission = held.gateway.gateway.state.admission
            assert admission.num_waiting == 0
            assert all(line.num_holding == 0 and not line.waiters for line in admission._lines.values())
            assert all(meter.num_inside == 0 for _, meter in admission._meters._meters.values())


async def test_what_finds_no_place_waits_and_goes_in_turn(start: Any) -> None:
    held = await start()
    first = held.send("one")
    await held.until_seen(1)
    rest = [held.send(text) for text in ("two", "three")]
    await held.until_waiting(2)
    assert await held.gateway.metric("headstart_queue_depth") == 2
    assert len(held.stub.seen) == 1
    held.gate.open()
    assert (await first).status == 200
    await held.until_seen(2)
    held.gate.open(2)
    assert [one.status for one in await asyncio.gather(*rest)] == [200, 200]
    assert await held.gateway.metric("headstart_queue_depth") == 0


async def test_a_client_that_leaves_while_queued_frees_its_place(start: Any) -> None:
    held = await start(max_queued_requests=1)
    held.send("one")
    await held.until_seen(1)
    waiting = held.send("leaves")
    await held.until_waiting(1)
    waiting.cancel()
    await held.until_waiting(0)
    third = held.send("three")
    await held.until_waiting(1)
    held.gate.open(2)
    assert (await third).status == 200
    assert held.texts() == ["one", "three"], "who left never reached a worker"
    assert await held.gateway.metric("headstart_client_disconnects_total") == 1


async def test_a_full_queue_says_when_to_come_back(start: Any) -> None:
    held = await start(max_queued_requests=1)
    held.send("one")
    await held.until_seen(1)
    held.send("two")
    await held.until_waiting(1)
    refused = await held.gateway.chat("three")
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert await held.rejected("queue_full") == 1


async def test_bytes_bound_the_queue_too(start: Any) -> None:
    held = await start(max_queued_bytes=2000)
    held.send("one")
    await held.until_seen(1)
    assert (await held.gateway.chat("x" * 3000)).status == 429
    held.send("small")
    await held.until_waiting(1)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_that_cannot_be_met_reads_the_same_at_once_and_in_line(start: Any, is_stream: bool) -> None:
    held = await start()
    at_once = await held.gateway.chat("x" * 50, stream=is_stream, headers={"x-request-deadline-ms": "1"})
    held.send("one")
    await held.until_seen(1)
    in_line = await held.gateway.chat("two", stream=is_stream, headers={"x-request-deadline-ms": "300"})
    for late in (at_once, in_line):
        assert (late.status, late.error["code"]) == (429, "queue_full")
        assert "x-request-deadline-ms" in late.error["message"]
        assert 1 <= int(late.headers["retry-after"]) <= 120
    assert (await held.rejected("deadline"), await held.rejected("queue_wait")) == (2, 0)
    assert len(held.stub.seen) == 1


async def test_waiting_ends_at_the_limit(start: Any) -> None:
    held = await start(max_queue_wait_s=0.2)
    held.send("one")
    await held.until_seen(1)
    late = await held.gateway.chat("two")
    assert (late.status, late.error["code"]) == (429, "queue_full")
    assert await held.rejected("queue_wait") == 1
    wrong = await held.gateway.chat("four", headers={"x-request-deadline-ms": "-1"})
    assert (wrong.status, wrong.error["param"]) == (400, "x-request-deadline-ms")


async def test_a_worker_that_does_not_begin_before_the_deadline_is_given_up(start: Any) -> None:
    held = await start()
    late = await held.gateway.chat("one", headers={"x-request-deadline-ms": "300"})
    assert (late.status, late.error["code"]) == (504, "worker_timeout")
    assert "x-request-deadline-ms" in late.error["message"]


async def test_what_would_miss_the_slo_is_shed_before_it_costs_anything(start: Any) -> None:
    """The stub states 1,000 tokens a second: 2,000 tokens cannot begin within a second, 50 can."""
    held = await start(ttft_slo_s=1.0)
    shed = await held.gateway.chat("x" * 2000)
    assert (shed.status, shed.error["code"]) == (429, "queue_full")
    assert await held.rejected("slo") == 1
    hopeless = await held.gateway.chat("x" * 500, headers={"x-request-deadline-ms": "100"})
    assert hopeless.status == 429
    assert await held.rejected("deadline") == 1
    assert not held.stub.seen
    held.gate.open()
    assert (await held.gateway.chat("x" * 50)).status == 200


async def test_priorities_order_what_waits(start: Any) -> None:
    held = await start()
    held.send("one")
    await held.until_seen(1)
    for number, (text, priority) in enumerate((("later", 5), ("soon", 0), ("first", -5)), 1):
        held.send(text, priority=priority)
        await held.until_waiting(number)
    held.gate.open(4)
    await asyncio.gather(*held.sent)
    assert held.texts() == ["one", "first", "soon", "later"]


async def test_tenants_take_turns_however_many_one_sends(start: Any, tmp_path: Path) -> None:
    held = await start(keys_file=keys_file(tmp_path, {"id": "a", "key": KEY_A}, {"id": "b", "key": KEY_B}),
                       max_queued_requests=8)
    held.send("a0", headers=as_key(KEY_A))
    await held.until_seen(1)
    flood = [held.send(f"a{number}", headers=as_key(KEY_A)) for number in range(1, 9)]
    await held.until_waiting(8)
    quiet = [held.send(f"b{number}", headers=as_key(KEY_B)) for number in range(2)]

    async def two_were_pushed_out() -> bool:
        return sum(task.done() for task in flood) == 2

    await held.gateway.until(two_were_pushed_out, "two of the flood made room")
    held.gate.open(9)
    assert [one.status for one in await asyncio.gather(*quiet)] == [200, 200]
    order = [text[0] for text in held.texts()]
    assert order.index("b") <= 2
    assert order[:6].count("b") == 2, "every other place was the quiet tenant's"
    assert sorted(one.status for one in await asyncio.gather(*flood)) == [200] * 6 + [429] * 2
    urgent = await held.gateway.chat("x", priority=-1, headers=as_key(KEY_B))
    assert (urgent.status, urgent.error["param"]) == (403, "priority")


async def test_a_request_that_names_no_priority_has_its_tenants_lowest(start: Any, tmp_path: Path) -> None:
    held = await start(keys_file=keys_file(tmp_path, {"id": "a", "key": KEY_A, "min_priority": 5},
                                           {"id": "b", "key": KEY_B, "min_priority": -5}))
    held.send("one", headers=as_key(KEY_B))
    await held.until_seen(1)
    for number, (text, key, asked) in enumerate((
            ("none", KEY_A, {}), ("as it may", KEY_A, {"priority": 5}), ("later", KEY_A, {"priority": 6}),
            ("null", KEY_A, {"priority": None}), ("other", KEY_B, {})), 1):
        held.send(text, headers=as_key(key), **asked)
        await held.until_waiting(number)
    urgent = await held.gateway.chat("x", headers=as_key(KEY_A), priority=4)
    assert (urgent.status, urgent.error["param"]) == (403, "priority")
    held.gate.open(6)
    assert {one.status for one in await asyncio.gather(*held.sent)} == {200}
    assert [text for text in held.texts() if text[0] != "o"] == ["none", "as it may", "null", "later"]
    told = {body["messages"][0]["content"]: body.get("priority") for body in held.bodies()}
    assert told == {"one": None, "other": None, "none": 5, "as it may": 5, "later": 6, "null": 5}, "workers go by it"


async def test_a_flood_leaves_a_place_to_others(start: Any, tmp_path: Path) -> None:
    held = await start(keys_file=keys_file(tmp_path, {"id": "a", "key": KEY_A}, {"id": "b", "key": KEY_B}),
                       max_inflight_per_worker=8, max_queued_requests=2)
    flood = [held.send(f"a{number}", headers=as_key(KEY_A)) for number in range(9)]
    await held.until_waiting(2)
    await held.until_seen(7)
    logged = await held.gateway.metric('headstart_overhead_seconds_count{stage="tokenize"}')
    refused = await held.gateway.chat("a9", headers=as_key(KEY_A))
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert await held.gateway.metric('headstart_overhead_seconds_count{stage="tokenize"}') == logged, "not tokenised"
    held.send("b0", headers=as_key(KEY_B))
    await held.until_seen(8)
    assert held.texts()[-1] == "b0", "at once, although two of the other tenant's wait and every answer is held"
    assert [seen.headers[TENANT_HEADER] for seen in held.stub.seen] == ["a"] * 7 + ["b"], "so the worker knows, too"
    held.gate.open(10)
    assert sorted(one.status for one in await asyncio.gather(*flood)) == [200] * 9


async def test_without_keys_every_place_is_taken(start: Any) -> None:
    held = await start(max_inflight_per_worker=8)
    for number in range(9):
        held.send(f"a{number}")
    await held.until_seen(8)
    await held.until_waiting(1)


async def test_a_tenants_limits_are_its_own(start: Any, tmp_path: Path) -> None:
    limited = {"id": "a", "key": KEY_A, "max_concurrent": 1, "requests_per_minute": 3, "tokens_per_minute": 200}
    held = await start(keys_file=keys_file(tmp_path, limited, {"id": "b", "key": KEY_B}), max_inflight_per_worker=9)
    first = held.send("one", headers=as_key(KEY_A))
    await held.until_seen(1)
    over = await held.gateway.chat("two", headers=as_key(KEY_A))
    assert (over.status, over.error["code"]) == (429, "rate_limited")
    assert await held.rejected("concurrency") == 1
    held.gate.open(9)
    assert (await first).status == 200
    over = await held.gateway.chat("x" * 170 + "three", headers=as_key(KEY_A))
    assert over.status == 429
    assert int(over.headers["retry-after"]) >= 1
    assert await held.rejected("token_rate") == 1
    assert (await held.gateway.chat("four", headers=as_key(KEY_A))).status == 200
    over = await held.gateway.chat("five", headers=as_key(KEY_A))
    assert over.error["code"] == "rate_limited"
    assert 1 <= int(over.headers["retry-after"]) <= 60
    assert (await held.gateway.chat("x" * 300, headers=as_key(KEY_B))).status == 200


async def test_a_budget_is_spent_and_the_refusal_says_when_the_next_begins(start: Any, tmp_path: Path) -> None:
    limited = {"id": "a", "key": KEY_A, "budget_tokens": 200, "budget_window": "month"}
    keys = keys_file(tmp_path, limited, {"id": "b", "key": KEY_B})
    held = await start(keys_file=keys, max_inflight_per_worker=9)
    held.gate.open(9)
    assert (await held.gateway.chat("x" * 150, headers=as_key(KEY_A))).status == 200
    for text in ("y" * 100, "z" * 60):
        over = await held.gateway.chat(text, headers=as_key(KEY_A))
        assert (over.status, over.error["code"]) == (429, "rate_limited")
        left_s = window_end(Window.MONTH, time.time()) - time.time()
        assert abs(int(over.headers["retry-after"]) - left_s) < 60
    assert await held.rejected("token_budget") == 2
    keys_file(tmp_path, {**limited, "budget_tokens": 300}, {"id": "b", "key": KEY_B})
    held.gateway.gateway.state.access.reload()
    assert (await held.gateway.chat("z" * 60, headers=as_key(KEY_A))).status == 200, "a larger budget"
    assert (await held.gateway.chat("z" * 90, headers=as_key(KEY_A))).status == 429, "of which some was spent"
    assert (await held.gateway.chat("x" * 300, headers=as_key(KEY_B))).status == 200


async def test_when_no_worker_is_left_nobody_is_kept_waiting(start: Any) -> None:
    held = await start(max_retries=0)
    held.send("one")
    await held.until_seen(1)
    waiting = held.send("two")
    await held.until_waiting(1)
    held.stub.kv_problem = 503
    answered = await waiting
    assert (answered.status, answered.error["code"]) == (503, "no_worker")
