"""Probes while the event loop is busy: answered by a thread, on connections that nobody would have accepted."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.server import probes
from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.gateway_processes import running_group
from tests.support.stub_worker import StubWorker, running

BUSY_S = 2.5


class Asked:
    """GETs from threads, each on its own connection, and when each was answered."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pool = ThreadPoolExecutor(16)

    def get(self, path: str) -> tuple[int, bytes, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(), time.monotonic()

    def while_busy(self, busy: threading.Event, *paths: str) -> list[asyncio.Future[tuple[int, bytes, float]]]:
        def ask(path: str) -> tuple[int, bytes, float]:
            assert busy.wait(20)
            return self.get(path)

        return [asyncio.wrap_future(self._pool.submit(ask, path)) for path in paths]


async def _busy(loop_is_busy: threading.Event) -> float:
    """Hold the loop as a long computation would; when it was let go."""
    await asyncio.sleep(0.2)
    loop_is_busy.set()
    time.sleep(BUSY_S)  # noqa: ASYNC251 - that is the point
    return time.monotonic()


async def _ready(gateway: GatewayUnderTest) -> None:
    async def ready() -> bool:
        return (await gateway.send("GET", "/readyz")).status == 200

    await gateway.until(ready, "ready")


async def test_probes_and_metrics_are_answered_while_the_loop_is_busy_and_the_rest_waits_for_it() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, root_path="/gw") as gateway:
        await _ready(gateway)
        loop_is_busy, asked = threading.Event(), Asked(gateway.gateway.port)
        answers = asked.while_busy(loop_is_busy, "/livez", "/readyz", "/gw/livez?x=1", "/metrics", "/v1/models")
        let_go_at = await _busy(loop_is_busy)
        live, ready, prefixed, metrics, models = await asyncio.gather(*answers)
        for status, _, at in (live, ready, prefixed, metrics):
            assert status == 200
            assert at < let_go_at, "it waited for the loop"
        assert json.loads(live[1]) == json.loads(prefixed[1]) == {"status": "ok"}
        assert b"headstart_inflight{worker=" in metrics[1]
        assert models[0] == 200
        assert models[2] > let_go_at, "only probes are answered by another thread"
        assert json.loads(models[1])["data"][0]["id"] == "stub"


async def test_a_thread_tells_of_no_worker_and_of_a_loop_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "STUCK_AFTER_S", 0.5)
    async with running_gateway() as gateway:
        loop_is_busy, asked = threading.Event(), Asked(gateway.gateway.port)
        answers = asked.while_busy(loop_is_busy, "/readyz")
        await _busy(loop_is_busy)
        status, body, _ = (await asyncio.gather(*answers))[0]
        assert (status, json.loads(body)) == (503, {"status": "no worker is ready"})
        loop_is_busy.clear()

        def later() -> tuple[int, bytes, float]:
            assert loop_is_busy.wait(20)
            time.sleep(1.0)
            return asked.get("/livez")

        answer = asyncio.get_running_loop().run_in_executor(None, later)
        let_go_at = await _busy(loop_is_busy)
        status, body, at = await answer
        assert at < let_go_at
        assert status == 503
        assert b"stuck" in body
        assert (await gateway.send("GET", "/livez")).status == 200


async def test_what_is_no_probe_is_left_to_the_loop_whole() -> None:
    """Heads in pieces, a body behind the head, no head at all, a client that leaves: nothing is lost or mixed up."""
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await _ready(gateway)
        port, loop_is_busy, told = gateway.gateway.port, threading.Event(), list[bytes]()

        def speak() -> None:
            assert loop_is_busy.wait(20)
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
            body = b'{"model":"stub","messages":[{"role":"user","content":"hello there"}]}'
            clients[0].sendall(b"GE")
            clients[1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                               b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            clients[2].sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n"
                               b"Connection: close\r\n\r\n")
            clients[3].close()
            time.sleep(0.8)
            clients[0].sendall(b"T /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            for client in clients[:3]:
                client.settimeout(20)
                heard = b""
                while part := client.recv(65536):
                    heard += part
                told.append(heard)
            clients[4].close()

        speaking = asyncio.get_running_loop().run_in_executor(None, speak)
        await _busy(loop_is_busy)
        await speaking
        in_pieces, post, pipelined = told
        assert in_pieces.startswith(b"HTTP/1.1 200")
        assert b'"stub"' in in_pieces
        assert post.startswith(b"HTTP/1.1 200")
        assert b"Hello world" in post
        assert pipelined.count(b"HTTP/1.1 200") == 2
        assert (await gateway.chat()).status == 200


BUSY_ON_SIGNAL = """
import signal, time
signal.signal(signal.SIGUSR2, lambda *_: time.sleep({seconds}))
"""


async def test_a_busy_process_keeps_nobody_waiting_while_another_is_not(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BUSY_ON_SIGNAL.format(seconds=8))
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_group(stub.url, processes=2, log=tmp_path / "log") as group:
        victim, other = group.pids()
        os.kill(victim, signal.SIGUSR2)
        await asyncio.sleep(0.5)
        answers = [await group.chat(f"{number} asks", key="none") for number in range(16)]
        assert [one.status for one in answers] == [200] * 16
        assert len(set(await group.process_of(*answers))) == 1, "the busy one accepted nobody"
        assert {(await group.send("GET", path)).status for path in ("/livez", "/readyz", "/metrics")} == {200}
        assert await group.metric("headstart_processes") == 2
        os.kill(other, signal.SIGUSR2)
        await asyncio.sleep(0.5)
        assert {(await group.send("GET", path)).status for path in ("/livez", "/readyz")} == {200}
