"""Start, loading, disconnects in every phase, draining, a quick stop, a dead engine: what clients and shells see."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from loadtests.local_stack import Child, free_port, start
from tests.support.tiny_worker import (
    WORKER_TOKEN,
    engine_pid,
    get_json,
    running_tiny_worker,
    until_idle,
    worker_client,
)
from worker.protocol.internal_request import WORKER_TOKEN_HEADER

COMPLETIONS = "/v1/completions"
TOKEN = {WORKER_TOKEN_HEADER: WORKER_TOKEN}
EXIT_WAIT_S = 90.0


def long_request(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "once upon a time", "max_tokens": 900, "ignore_eos": True} | fields


async def exit_code(worker: Child) -> int:
    return await asyncio.to_thread(worker.process.wait, EXIT_WAIT_S)


def last_error_event(body: bytes) -> dict[str, Any]:
    assert not body.endswith(b"data: [DONE]\n\n"), "a stream cut short must not look complete"
    last = body.strip().split(b"\n\n")[-1]
    return dict(orjson.loads(last.removeprefix(b"data: "))["error"])


# -- loading ---------------------------------------------------------------------------------------


async def test_alive_but_not_ready_while_loading(tiny_model: Path) -> None:
    with running_tiny_worker(tiny_model, wait=False) as worker:
        async with worker_client(worker) as client:
            await asyncio.to_thread(worker.wait_ready, "/livez")
            seen = {}
            for path in ("/readyz", "/health", "/kv", "/v1/models"):
                async with client.get(path) as response:
                    seen[path] = response.status
            async with client.post(COMPLETIONS, json=long_request()) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (503, "worker_loading"), error
                assert int(response.headers["Retry-After"]) >= 1
            assert set(seen.values()) == {503}, seen
            await asyncio.to_thread(worker.wait_ready, "/readyz")
            async with client.get("/health") as response:
                assert response.status == 200
            blocks = (await get_json(client, "/kv"))["blocks"]
            assert blocks["free"] == blocks["total"] > 0, "a pool is there before the first step"


async def test_a_port_in_use_is_one_line_and_exit_2(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worker = start(["worker", "--model", str(tiny_model), "--port", str(port)], url=f"http://127.0.0.1:{port}")
        try:
            assert await exit_code(worker) == 2
            [line] = [line for line in worker.log_tail().splitlines() if not line.startswith("{")]
            assert f"127.0.0.1:{port}" in line
            assert "--port" in line
        finally:
            worker.stop()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_a_missing_model_is_one_line_and_exit_2(host: str, warned: bool, tmp_path: Path) -> None:
    """Without a token a worker that the network can reach says what that means."""
    worker = start(["worker", "--model", str(tmp_path / "nowhere.gguf"), f"--host={host}", f"--port={free_port()}"],
                   url="")
    try:
        assert await exit_code(worker) == 2
        assert ("HEADSTART_WORKER_TOKEN" in worker.log_tail()) == warned
        [line] = [line for line in worker.log_tail().splitlines() if not line.startswith("{")]
        assert "nowhere.gguf" in line
        assert "Traceback" not in worker.log_tail()
    finally:
        worker.stop()


# -- clients that leave ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow_worker(tiny_model: Path) -> Iterator[Child]:
    """Runs one sequence at a time and lets two more wait."""
    with running_tiny_worker(tiny_model, "--max-running", "1", "--max-waiting", "2") as worker:
        yield worker


@pytest.fixture
async def narrow(narrow_worker: Child) -> AsyncIterator[aiohttp.ClientSession]:
    async with worker_client(narrow_worker) as client:
        yield client


async def leave_soon(client: aiohttp.ClientSession, body: dict[str, Any], *, after_s: float) -> None:
    """Send a request whose answer takes longer than we wait for it; the connection is closed."""
    with pytest.raises(TimeoutError):
        async with client.post(COMPLETIONS, json=body, timeout=aiohttp.ClientTimeout(total=after_s)) as response:
            await response.read()


async def test_a_client_that_leaves_frees_the_engine_in_every_phase(narrow: aiohttp.ClientSession) -> None:
    # Mid-stream.
    async with narrow.post(COMPLETIONS, json=long_request(stream=True)) as stream:
        await stream.content.readuntil(b"\n\n")
        # Queued behind it, streaming and not.
        await leave_soon(narrow, long_request(stream=True), after_s=0.1)
        await leave_soon(narrow, long_request(), after_s=0.1)
        stream.close()
    state = await until_idle(narrow)
    computed = state["computed_positions_total"]
    # Whole answers: nothing is written before the end, only the connection tells.
    await leave_soon(narrow, long_request(n=2), after_s=0.1)
    state = await until_idle(narrow)
    assert state["computed_positions_total"] - computed < 2 * 900, "it was stopped, not finished"
    assert state["blocks"]["used"] == 0


async def test_abort_by_request_id_ends_the_stream(narrow: aiohttp.ClientSession) -> None:
    async with narrow.post(COMPLETIONS, json=long_request(stream=True), headers={"x-request-id": "victim"}) as stream:
        await stream.content.readuntil(b"\n\n")
        async with narrow.post("/abort", json={"request_id": "victim"}, headers=TOKEN) as response:
            assert await response.json() == {"aborted": 1}
        rest = await stream.content.read()
    assert b'"finish_reason":"abort"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    async with narrow.post("/abort", json={"request_id": "victim"}, headers=TOKEN) as response:
        assert await response.json() == {"aborted": 0}
    await until_idle(narrow)


async def test_a_full_queue_is_429_with_retry_after(narrow: aiohttp.ClientSession) -> None:
    async with narrow.post(COMPLETIONS, json=long_request(n=3, stream=True)) as stream:
        await stream.content.readuntil(b"\n\n")
        async with narrow.post(COMPLETIONS, json=long_request(max_tokens=1)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
            assert int(response.headers["Retry-After"]) >= 1
        stream.close()
    async with narrow.post(COMPLETIONS, json=long_request(n=4)) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "n"), "four never fit, however long one waits"
    await until_idle(narrow)


# -- stopping --------------------------------------------------------------------------------------


async def test_after_sigterm_a_worker_is_not_ready_but_accepts_for_a_while(tiny_model: Path) -> None:
    with running_tiny_worker(tiny_model, "--drain-delay-s", "60") as worker:
        async with worker_client(worker) as client:
            worker.process.send_signal(signal.SIGTERM)
            await until_not_ready(client)
            assert (await get_json(client, "/kv"))["draining"] is True
            async with client.post(COMPLETIONS, json=long_request(max_tokens=3)) as response:
                assert response.status == 200, await response.text()
            worker.process.send_signal(signal.SIGTERM)
            assert await exit_code(worker) == 0, "a second signal means now"


async def until_not_ready(client: aiohttp.ClientSession) -> None:
    """The signal is handled a moment later: ask until it shows."""
    while True:
        async with client.get("/readyz") as response:
            if response.status == 503:
                return


async def test_sigterm_finishes_streams_and_refuses_new_work(tiny_model: Path) -> None:
    with running_tiny_worker(tiny_model, "--drain-delay-s", "0") as worker:
        async with worker_client(worker) as client:
            async with client.post(COMPLETIONS, json=long_request(stream=True)) as stream:
                await stream.content.readuntil(b"\n\n")
                worker.process.send_signal(signal.SIGTERM)
                await until_not_ready(client)
                async with client.post(COMPLETIONS, json=long_request()) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (503, "worker_draining")
                    assert "Retry-After" in response.headers
                async with client.get("/livez") as response:
                    assert response.status == 200
                assert (await stream.content.read()).endswith(b"data: [DONE]\n\n")
            assert await exit_code(worker) == 0


async def test_when_draining_takes_too_long_streams_end_with_an_error(tiny_model: Path) -> None:
    with running_tiny_worker(tiny_model, "--drain-delay-s", "0", "--drain-s", "0.05") as worker:
        async with worker_client(worker) as client:
            async with client.post(COMPLETIONS, json=long_request(stream=True)) as stream:
                await stream.content.readuntil(b"\n\n")
                worker.process.send_signal(signal.SIGTERM)
                assert last_error_event(await stream.content.read())["code"] == "worker_draining"
            assert await exit_code(worker) == 0


async def test_sigint_stops_at_once_also_while_loading(tiny_model: Path) -> None:
    with running_tiny_worker(tiny_model, wait=False) as worker:
        await asyncio.to_thread(worker.wait_ready, "/livez")
        worker.process.send_signal(signal.SIGINT)
        assert await exit_code(worker) == 0
        assert "Traceback" not in worker.log_tail()


async def test_a_dead_engine_ends_every_stream_with_an_error_and_the_process(tiny_model: Path) -> None:
    with running_tiny_worker(tiny_model) as worker:
        async with worker_client(worker) as client:
            waiting = asyncio.ensure_future(whole_answer(client))
            async with client.post(COMPLETIONS, json=long_request(stream=True)) as stream:
                await stream.content.readuntil(b"\n\n")
                os.kill(engine_pid(worker), signal.SIGKILL)
                assert last_error_event(await stream.content.read())["code"] == "worker_failed"
            assert await waiting == (500, "worker_failed")
            assert await exit_code(worker) == 1
        assert [line for line in worker.log_tail().splitlines() if line.startswith("headstart worker: ")]
        assert "Traceback" not in worker.log_tail()


async def whole_answer(client: aiohttp.ClientSession) -> tuple[int, str]:
    async with client.post(COMPLETIONS, json=long_request(n=4)) as response:
        return response.status, (await response.json())["error"]["code"]


def test_the_shell_imports_no_torch(worker: Child) -> None:
    mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "libtorch" in Path(f"/proc/{engine_pid(worker)}/maps").read_text(), "or the test would prove nothing"
