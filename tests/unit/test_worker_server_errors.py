"""The outermost middleware over a real socket, and the phases that refuse work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from worker.config import THREADS_MAX, WorkerConfig
from worker.engine.engine_client import EngineClient
from worker.engine.messages import EngineFailed
from worker.protocol.api_error import ApiError
from worker.server.app import UsageError, build_app, engine_config, warn_of_threads
from worker.server.error_middleware import error_middleware
from worker.server.events_publisher import EventsPublisher
from worker.server.shell import Phase, Shell


async def bug(request: web.Request) -> web.Response:
    raise RuntimeError("a secret of the implementation")


async def refusal(request: web.Request) -> web.Response:
    raise ApiError(429, "queue_full", "later", headers={"Retry-After": "3"})


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    app = web.Application(middlewares=[error_middleware])
    app.router.add_get("/bug", bug)
    app.router.add_get("/refusal", refusal)
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        yield session


async def test_a_bug_leaks_nothing_but_the_request_id(client: aiohttp.ClientSession) -> None:
    async with client.get("/bug", headers={"x-request-id": "find-me"}) as response:
        text = await response.text()
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert "find-me" in error["message"]
    assert "secret" not in text
    assert response.headers["x-request-id"] == "find-me"


async def test_headers_of_a_refusal_are_sent(client: aiohttp.ClientSession) -> None:
    async with client.get("/refusal") as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "3")


async def test_routing_refusals_have_the_same_shape(client: aiohttp.ClientSession) -> None:
    async with client.get("/nowhere") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with client.post("/bug") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("given", ["a b", "x" * 129, "café", "a\tb"])
async def test_an_unusable_request_id_is_replaced(client: aiohttp.ClientSession, given: str) -> None:
    async with client.get("/refusal", headers={"x-request-id": given}) as response:
        assert response.headers["x-request-id"] != given
        assert len(response.headers["x-request-id"]) == 32


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    publisher = EventsPublisher("127.0.0.1", 0)
    yield Shell(WorkerConfig(), EngineClient(), publisher)
    await publisher.close()


async def test_a_loading_worker_says_when_to_come_back(shell: Shell) -> None:
    with pytest.raises(ApiError) as caught:
        shell.require_serving()
    assert (caught.value.status, caught.value.code) == (503, "worker_loading")
    assert "Retry-After" in caught.value.headers


async def test_a_failure_is_final(shell: Shell) -> None:
    shell.on_report(EngineFailed("no such model", users_fault=True))
    shell.on_report(EngineFailed("something later", users_fault=False))
    shell.drain()
    assert shell.phase is Phase.FAILED
    assert shell.failed.is_set()
    assert shell.failure is not None
    assert shell.failure.users_fault, "the first failure is the one to tell"
    with pytest.raises(ApiError, match="no such model"):
        shell.require_accepting()


async def test_draining_refuses_before_anything_is_read(shell: Shell) -> None:
    shell.drain()
    async with TestServer(build_app(shell)) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        async with session.post("/v1/completions", data=b"not even JSON") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "worker_draining")
        async with session.get("/livez") as response:
            assert response.status == 200


async def test_idle_follows_the_answers_under_way(shell: Shell) -> None:
    assert shell.idle.is_set()
    with shell.answering(), shell.answering():
        assert not shell.idle.is_set()
    assert shell.idle.is_set()


def test_engine_config_carries_every_setting_over() -> None:
    config = WorkerConfig(model="m", threads="3", hash_seed="00ff", max_context=77, cache_dir=Path("c"))
    engine = engine_config(config)
    assert (engine.threads, engine.hash_seed, engine.max_context, engine.cache_dir) == (3, b"\x00\xff", 77, Path("c"))
    assert engine_config(WorkerConfig()).threads == 0


@pytest.mark.parametrize(("field", "value"), [("threads", "many"), ("hash_seed", "xyz")])
def test_a_setting_that_cannot_be_read_is_named(field: str, value: str) -> None:
    with pytest.raises(UsageError, match=field):
        engine_config(WorkerConfig(**{field: value}))


def test_more_threads_than_cores_are_warned_of() -> None:
    with capture_logs() as lines:
        warn_of_threads(1)
        assert not lines
        warn_of_threads(THREADS_MAX)
    assert [(line["event"], line["log_level"], line["threads"]) for line in lines] == [
        ("more_threads_than_cores", "warning", THREADS_MAX)]
