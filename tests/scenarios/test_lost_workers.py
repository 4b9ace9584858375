"""The table of gateway/README.md: what clients see when a real worker stalls, breaks off or talks nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtests.local_stack import Child
from tests.support.cutting_proxy import Cut, cutting_proxies
from tests.support.gateway_in_process import ADMIN, GatewayUnderTest, running_gateway
from tests.support.tiny_worker import (
    WORKER_TOKEN,
    engine_pid,
    running_tiny_worker,
    until_idle,
    worker_client,
    write_tiny_model,
)

CHAT = "/v1/chat/completions"
IN_THE_MIDDLE, AT_ONCE = 2500, 0
STALLED = (503, "worker_stalled")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 60,
        "temperature": 1.0, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Child]]:
    model = write_tiny_model(Path(tmp_path_factory.mktemp("tiny-model")))
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(running_tiny_worker(model, "--exactness", "strict", "--max-running", "1",
                                                            "--drain-s", "0.01", wait=False)) for _ in range(2)]
        for child in children:
            child.wait_ready()
        yield children


@dataclass(frozen=True)
class Case:
    """`cut`: what the worker that is asked first does. `moved`, `retried`: what the gateway's counters say."""

    name: str
    cut: Cut
    stream: bool = True
    moved: int = 0
    retried: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("its connection is reset in mid-stream", Cut(IN_THE_MIDDLE), moved=1),
    Case("it half-closes the connection in mid-stream", Cut(IN_THE_MIDDLE, "half-close"), moved=1),
    Case("it ends the body without [DONE]", Cut(IN_THE_MIDDLE, "finish"), moved=1),
    Case("it falls silent in mid-stream", Cut(IN_THE_MIDDLE, "silence"), moved=1,
         settings={"chunk_gap_timeout_s": 3.0}),  # a busy machine keeps quiet for half a second by itself
    Case("it writes garbage in mid-stream", Cut(IN_THE_MIDDLE, "garbage"), moved=1),
    Case("it writes garbage instead of an answer", Cut(AT_ONCE, "garbage"), retried=1),
    # A kept connection that ends without a byte is replaced by a fresh one, unnoticed.
    Case("its connection is reset before the first byte", Cut(AT_ONCE)),
    Case("it half-closes the connection before the first byte", Cut(AT_ONCE, "half-close")),
    Case("a whole answer is cut short", Cut(600), stream=False, retried=1),
]


@contextlib.asynccontextmanager
async def fronted(workers: list[Child], **settings: Any) -> AsyncIterator[tuple[GatewayUnderTest, Any]]:
    async with cutting_proxies(*(worker.url for worker in workers)) as proxies, running_gateway(
            *(proxy.url for proxy in proxies), worker_token=WORKER_TOKEN, **settings) as gateway:
        await gateway.until_exact(num_workers=2)
        yield gateway, proxies


def comparable(body: bytes) -> bytes:
    return re.sub(rb'"(created|cached_tokens)":\d+', rb'"\1":0', body)


async def ask(gateway: GatewayUnderTest, *, stream: bool) -> bytes:
    answer = await gateway.send("POST", CHAT, payload={**BODY, "stream": stream}, headers={"x-request-id": "same"})
    assert answer.status == 200, answer.body
    return comparable(answer.body)


async def ask_each(gateway: GatewayUnderTest, *, stream: bool) -> bytes:
    """Each worker's answer, which is the same; there is a kept connection to both then."""
    answers = set()
    for index in range(2):
        other = f"/admin/workers/{(await gateway.worker(1 - index))['id']}"
        await gateway.send("POST", f"{other}/drain", headers=ADMIN)
        answers.add(await ask(gateway, stream=stream))
        await gateway.send("POST", f"{other}/undrain", headers=ADMIN)
    [answer] = answers
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_client_gets_the_undisturbed_answer(workers: list[Child], case: Case) -> None:
    async with fronted(workers, **case.settings) as (gateway, proxies):
        whole = await ask_each(gateway, stream=case.stream)
        shared = [case.cut]
        for proxy in proxies:
            proxy.cuts = shared  # whoever is asked first takes it
        assert await ask(gateway, stream=case.stream) == whole
        assert sum(proxy.num_cut for proxy in proxies) == 1
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') == case.moved
        retries = [await gateway.metric(f'headstart_retries_total{{reason="{reason}"}}')
                   for reason in ("reset", "worker_error")]
        assert sum(retries) == case.retried
        assert [(await gateway.worker(index))["inflight"] for index in range(2)] == [0, 0]
    await nothing_left(workers)


async def nothing_left(workers: list[Child]) -> None:
    for worker in workers:
        async with worker_client(worker) as client:
            assert (await until_idle(client))["blocks"]["used"] == 0


async def first_bytes(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await response.content.readany()
    return data


@pytest.mark.parametrize("by", ["the gap limit", "the poll"])
async def test_a_stopped_worker(workers: list[Child], by: str) -> None:
    """SIGSTOP: the connection stays open and nothing comes. By the poll it is known long before the gap limit."""
    settings = {"chunk_gap_timeout_s": 1.0} if by == "the gap limit" else {}
    async with running_gateway(*(worker.url for worker in workers), worker_token=WORKER_TOKEN,
                               **settings) as gateway:
        await gateway.until_exact(num_workers=2)
        body = {**BODY, "stream": True, "max_tokens": 900}
        whole = await gateway.send("POST", CHAT, payload=body, headers={"x-request-id": "same"})
        by_id = {worker.url.removeprefix("http://"): worker for worker in workers}
        async with gateway.session.post(gateway.url + CHAT, json=body, headers={"x-request-id": "same"}) as response:
            beginning = await first_bytes(response, 2000)
            stopped = by_id[response.headers["x-headstart-worker"]].process.pid
            os.kill(stopped, signal.SIGSTOP)
            try:
                rest = await asyncio.wait_for(response.content.read(), 30)
            finally:
                os.kill(stopped, signal.SIGCONT)
        assert comparable(beginning + rest) == comparable(whole.body)
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') == 1
        await gateway.until_exact(num_workers=2)
    await nothing_left(workers)


async def test_a_worker_whose_engine_alone_is_stopped(workers: list[Child]) -> None:
    """Its HTTP front answers as ever, and says that the engine gives no sign of life: as good as a lost worker."""
    async with running_gateway(*(worker.url for worker in workers), worker_token=WORKER_TOKEN) as gateway:
        await gateway.until_exact(num_workers=2)
        body = {**BODY, "max_tokens": 900}
        whole = await _stream(gateway, body)
        waiting_whole = await ask(gateway, stream=False)
        spare = f"/admin/workers/{(await gateway.worker(1))['id']}"
        await gateway.send("POST", f"{spare}/drain", headers=ADMIN)
        first_id = (await gateway.worker(0))["id"]
        [first] = [worker for worker in workers if worker.url.endswith(first_id)]
        engine = engine_pid(first)
        async with worker_client(first) as client:
            streamed = asyncio.create_task(_stream(gateway, body))
            await gateway.until(lambda: _load(client, "running"), "it is computed")
            waited = asyncio.create_task(ask(gateway, stream=False))
            await gateway.until(lambda: _load(client, "waiting"), "it waits")
            os.kill(engine, signal.SIGSTOP)
            try:
                await gateway.send("POST", f"{spare}/undrain", headers=ADMIN)
                assert await asyncio.wait_for(streamed, 60) == whole
                assert await asyncio.wait_for(waited, 60) == waiting_whole
                assert (await gateway.worker(0))["state"] == "unready"
                assert [await _said(client, path) for path in ("/readyz", "/health", "/kv")] == [STALLED] * 3
                assert await _said(client, CHAT, BODY) == STALLED, "or a client would wait for nothing"
                assert await _said(client, "/livez") == (200, "")
            finally:
                os.kill(engine, signal.SIGCONT)
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') == 1
        await gateway.until_exact(num_workers=2)
    await nothing_left(workers)


async def _stream(gateway: GatewayUnderTest, body: dict[str, Any]) -> bytes:
    answer = await gateway.send("POST", CHAT, payload={**body, "stream": True}, headers={"x-request-id": "streamed"})
    return comparable(answer.body)


async def _said(client: aiohttp.ClientSession, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status, and the error's code if it is one."""
    async with client.request("GET" if body is None else "POST", path, json=body) as response:
        error = (await response.json())["error"] if response.status >= 400 else {"code": ""}
        return response.status, error["code"]


@pytest.mark.parametrize("phase", ["queued at the gateway", "queued at the worker", "before the first byte",
                                   "in mid-stream"])
async def test_a_client_that_leaves_leaves_nothing_behind(workers: list[Child], phase: str) -> None:
    """The worker runs one sequence at a time, so a second one waits there; the gateway's places are in its hands."""
    places = {"max_inflight_per_worker": 1} if phase == "queued at the gateway" else {}
    async with running_gateway(workers[0].url, worker_token=WORKER_TOKEN, **places) as gateway:
        await gateway.until_exact()
        busy = None
        if phase.startswith("queued"):
            busy = await gateway.session.post(gateway.url + CHAT, json={**BODY, "stream": True, "max_tokens": 900})
            await first_bytes(busy, 10)
        asked = asyncio.create_task(_leave(gateway, in_mid_stream=phase == "in mid-stream"))
        async with worker_client(workers[0]) as client:
            if phase == "queued at the gateway":
                await gateway.until(lambda: gateway.metric("headstart_queue_depth"), "it waits")
            elif phase == "queued at the worker":
                await gateway.until(lambda: _load(client, "waiting"), "it waits")
            elif phase == "before the first byte":
                await gateway.until(lambda: _load(client, "running"), "it is computed")
            else:
                await asked
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
            await gateway.until(lambda: _gone(gateway, client, num_running=0 if busy is None else 1), "it is gone")
        if busy is not None:
            busy.close()
        await gateway.until(lambda: _is_idle(gateway), "nothing is booked")
        assert await gateway.metric("headstart_client_disconnects_total") == (1 if busy is None else 2)
    await nothing_left(workers)


async def _leave(gateway: GatewayUnderTest, *, in_mid_stream: bool) -> None:
    body = {**BODY, "stream": in_mid_stream, "max_tokens": 900}
    async with gateway.session.post(gateway.url + CHAT, json=body) as response:
        await first_bytes(response, 1500)
        if in_mid_stream:
            response.close()


async def _load(client: aiohttp.ClientSession, name: str) -> int:
    async with client.get("/kv") as response:
        return int((await response.json(content_type=None))["load"][name])


async def _gone(gateway: GatewayUnderTest, client: aiohttp.ClientSession, *, num_running: int) -> bool:
    waits = await gateway.metric("headstart_queue_depth")
    return waits == 0 and await _load(client, "waiting") == 0 and await _load(client, "running") <= num_running


async def _is_idle(gateway: GatewayUnderTest) -> bool:
    return bool((await gateway.worker())["inflight"] == 0)


async def test_a_drain_by_the_operator_moves_nothing(workers: list[Child]) -> None:
    async with running_gateway(*(worker.url for worker in workers), worker_token=WORKER_TOKEN) as gateway:
        await gateway.until_exact(num_workers=2)
        body = {**BODY, "stream": True, "max_tokens": 900}
        async with gateway.session.post(gateway.url + CHAT, json=body) as response:
            await first_bytes(response, 2000)
            drained = response.headers["x-headstart-worker"]
            assert (await gateway.send("POST", f"/admin/workers/{drained}/drain", headers=ADMIN)).status == 202
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b"event: error" not in rest
        assert await gateway.metric('headstart_migrations_total{outcome="ok"}') == 0
        again = await gateway.send("POST", CHAT, payload={**BODY, "max_tokens": 2})
        assert again.headers["x-headstart-worker"] != drained


async def test_what_a_worker_cannot_finish_before_it_ends_moves(workers: list[Child]) -> None:
    """SIGTERM: the worker goes on for its drain_s, then says that it gives up. It ends here, so this test is last."""
    async with running_gateway(*(worker.url for worker in workers), worker_token=WORKER_TOKEN) as gateway:
        await gateway.until_exact(num_workers=2)
        # Four choices, one after the other since the worker runs one at a time: it cannot be done in time.
        body = {**BODY, "stream": True, "max_tokens": 900, "n": 4}
        whole = await gateway.send("POST", CHAT, payload=body, headers={"x-request-id": "same"})
        by_id = {worker.url.removeprefix("http://"): worker for worker in workers}
        async with gateway.session.post(gateway.url + CHAT, json=body, headers={"x-request-id": "same"}) as response:
            beginning = await first_bytes(response, 2000)
            by_id[response.headers["x-headstart-worker"]].process.send_signal(signal.SIGTERM)
            rest = await response.content.read()
        assert by_choice(beginning + rest) == by_choice(whole.body)
        assert 1 <= await gateway.metric('headstart_migrations_total{outcome="ok"}') <= 4


def by_choice(body: bytes) -> list[bytes]:
    """The events of each choice in their order, one choice behind the other."""
    return sorted(comparable(body).split(b"\n\n"), key=lambda event: re.findall(rb'"index":(\d+),"delta"', event))
