"""Workers added and removed while the gateway runs, over real sockets; and addresses where none may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from gateway.admission.worker_networks import WorkerNetworks, worker_networks_problem
from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN, Answer, GatewayUnderTest, running_gateway
from tests.support.stub_worker import Seen, StubWorker, events_of, open_stream, running


async def add(gateway: GatewayUnderTest, **body: Any) -> Answer:
    return await gateway.send("POST", "/admin/workers", headers=ADMIN, payload=body)


async def remove(gateway: GatewayUnderTest, worker_id: str) -> Answer:
    return await gateway.send("DELETE", f"/admin/workers/{worker_id}", headers=ADMIN)


async def test_a_worker_is_added_serves_and_is_forgotten() -> None:
    first, second = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    async with running(first, second), running_gateway(first.url) as gateway:
        await gateway.until_exact()
        assert (await add(gateway, url=second.url, id="second")).status == 201
        await gateway.until_exact(num_workers=2)
        assert (await add(gateway, url=second.url, id="second")).error["param"] == "id"
        twice = await add(gateway, url=second.url + "/", id="alias")
        assert (twice.status, twice.error["code"], twice.error["param"]) == (409, "worker_exists", "url")
        first_id = (await gateway.worker(0))["id"]
        assert (await remove(gateway, first_id)).status == 200
        for number in range(3):
            assert (await gateway.chat(f"{number}")).headers["x-headstart-worker"] == "second"
        assert not first.seen
        assert (await gateway.worker(0))["id"] == "second"
        assert (await remove(gateway, "second")).status == 200
        assert (await gateway.chat()).status == 503
        async with gateway.session.get(f"{gateway.url}/metrics") as response:
            assert 'worker="' not in await response.text(), "series of a removed worker are gone"
        assert (await add(gateway, url=second.url)).status == 201, "it may come back, under its own name"
        await gateway.until_exact()
        assert (await gateway.chat()).status == 200


async def test_what_runs_at_a_removed_worker_ends_well() -> None:
    may_end = asyncio.Event()

    async def held(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, {})
        first, *rest = events_of(seen)
        await response.write(first)
        await may_end.wait()
        for event in rest:
            await response.write(event)
        await response.write_eof()
        return response

    stub = StubWorker(worker_token=WORKER_TOKEN)
    stub.next_behaviours.append(held)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        asking = asyncio.create_task(gateway.chat(stream=True))

        async def is_asked() -> bool:
            return bool(stub.seen)

        await gateway.until(is_asked, "the worker has the request")
        assert (await remove(gateway, (await gateway.worker())["id"])).status == 200
        may_end.set()
        answer = await asking
        assert (answer.status, answer.body.endswith(b"data: [DONE]\n\n")) == (200, True)


async def test_a_drained_worker_can_be_put_back() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        worker_id = (await gateway.worker())["id"]
        for verb, status, state, answered in (("undrain", 200, "ready", 200), ("drain", 202, "draining", 503),
                                              ("drain", 202, "draining", 503), ("undrain", 200, "ready", 200)):
            answer = await gateway.send("POST", f"/admin/workers/{worker_id}/{verb}", headers=ADMIN)
            assert (answer.status, json.loads(answer.body)) == (status, {"id": worker_id, "state": state})
            assert (await gateway.worker())["state"] == state
            assert (await gateway.chat()).status == answered


async def test_models_stay_listed_while_their_workers_are_drained() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        said = [(await gateway.send("GET", path)).body for path in ("/v1/models", "/v1/models/stub")]
        worker_id = (await gateway.worker())["id"]
        await gateway.send("POST", f"/admin/workers/{worker_id}/drain", headers=ADMIN)
        assert [(await gateway.send("GET", path)).body for path in ("/v1/models", "/v1/models/stub")] == said
        for stream in (False, True):
            refused = await gateway.chat(stream=stream)
            assert (refused.status, refused.error["code"]) == (503, "no_worker")
            assert refused.headers["retry-after"]
        assert (await gateway.send("GET", "/v1/models/other")).status == 404
        assert (await remove(gateway, worker_id)).status == 200
        assert json.loads((await gateway.send("GET", "/v1/models")).body)["data"] == []


async def test_no_worker_can_be_added_where_none_may_be() -> None:
    asked: list[str] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append("connection")
        writer.close()

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, running_gateway("http://localhost:1", worker_networks=("10.1.0.0/16",)) as gateway:
        for url in (f"http://127.0.0.1:{port}", "http://169.254.169.254/latest", f"http://[::ffff:127.0.0.1]:{port}",
                    f"http://0x7f000001:{port}", f"http://2130706433:{port}", f"http://127.1:{port}",
                    f"http://localhost.example:{port}", f"http://localhost@127.0.0.1:{port}", f"ftp://localhost:{port}",
                    "file:///etc/passwd", f"http://localhost:{port}?x", "http://", "gopher://localhost",
                    f"http://user:pass@localhost:{port}", "http://10.2.0.1:8000", "http://[fe80::1%25eth0]:80"):
            answer = await add(gateway, url=url)
            assert (answer.status, answer.error["param"]) == (403, "url"), url
        for body, param in (({}, "url"), ({"url": 1}, "url"), ({"url": "http://localhost:2", "id": "a b"}, "id"),
                            ({"url": "http://localhost:2", "id": "a\n"}, "id"),
                            ({"url": "http://localhost:2", "more": 1}, "more")):
            answer = await add(gateway, **body)
            assert (answer.status, answer.error["param"]) == (400, param), body
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in (("POST", "/admin/workers"), ("DELETE", "/admin/workers/localhost:1")):
                assert (await gateway.send(method, path, headers=headers, body=b"{}")).status == 401
        assert (await remove(gateway, "nobody")).status == 404
        await asyncio.sleep(0.1)
        assert len((await gateway.worker())["id"]) > 0
        assert (await add(gateway, url="http://10.1.2.3:9", id="far")).status == 201
        assert (await remove(gateway, "far")).status == 200
    assert asked == []


@pytest.mark.parametrize(("allowed", "is_right"), [
    (("10.0.0.0/8", "fd00::/8", "worker-0.workers.svc"), True), ((), True), (("10.0.0.0/33",), False),
    (("http://x",), False), (("*",), False), (("",), False), (("10.0.0",), False)])
def test_the_setting_is_checked(allowed: tuple[str, ...], is_right: bool) -> None:
    assert (worker_networks_problem(allowed) is None) is is_right


def test_what_is_configured_may_be_added_again_at_another_port() -> None:
    networks = WorkerNetworks(("Worker-1.svc",), ["https://Engine.example:8000", "http://[fd00::1]:8000"])
    for url in ("http://worker-1.svc:1", "http://ENGINE.example:2", "http://[fd00::1]:3", "https://engine.example"):
        assert networks.problem(url) is None, url
    for url in ("http://worker-2.svc:1", "http://[fd00::2]:3", "http://engine.example.org", "http://engine.example:0"):
        assert networks.problem(url) is not None, url
