"""`headstart replay` over real sockets: through a gateway, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from loadtests.live.command import main
from loadtests.local_stack import free_port
from loadtests.traces import load_trace
from tests.support.gateway_in_process import WORKER_TOKEN, running_gateway
from tests.support.simulated import TRACES
from tests.support.stub_worker import (
    TEXT,
    Behaviour,
    Seen,
    StubWorker,
    answer,
    die_mid_stream,
    end_without_done,
    never_answer,
    refuse,
    running,
)

MOONCAKE = str(TRACES / "mooncake_small.jsonl")
CONVERSATIONS = str(TRACES / "conversations_small.jsonl")
AT_ONCE = ("--rate", "1e6", "--model", "stub", "--token-ids", "10:200", "--block-size", "16")


async def replay(*arguments: str, status: int = 0) -> None:
    """In a thread: the command has an event loop of its own."""
    assert await asyncio.to_thread(main, arguments) == status


def report_in(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The first one printed; a gateway in this process may have logged before it."""
    out = capsys.readouterr().out
    report, _ = json.JSONDecoder().raw_decode(out[out.index("{\n"):])
    return dict(report)


def prompt_of(seen: Seen) -> Any:
    body = orjson.loads(seen.body)
    return body.get("prompt") or body["messages"]


async def test_ids_become_prompts_of_the_traces_lengths_and_sharing(capsys: pytest.CaptureFixture[str]) -> None:
    trace = load_trace(Path(MOONCAKE), block_size=16).head(30)
    stub = StubWorker()
    async with running(stub):
        await replay(MOONCAKE, "--url", stub.url, *AT_ONCE, "--requests", "30", "--json")
        first_run = sorted(map(prompt_of, stub.seen))
        await replay(MOONCAKE, "--url", stub.url, *AT_ONCE, "--requests", "30", "--json")
    assert sorted(map(prompt_of, stub.seen[30:])) == first_run
    assert sorted(map(len, first_run)) == sorted(request.prompt_tokens for request in trace.requests)
    blocks = {tuple(prompt[16 * at:16 * at + 16]) for prompt in first_run for at in range(len(prompt) // 16)}
    assert len(blocks) == len({block for request in trace.requests for block in request.block_ids})
    assert all(orjson.loads(seen.body)["ignore_eos"] is True for seen in stub.seen)
    report = report_in(capsys)
    [policy] = report["policies"]
    assert (policy["requests"], policy["failed"], report["errors"]) == (30, 0, {})
    assert (report["speed"], report["rate"]) == (None, 1e6)
    assert report["cached_tokens"] == sum(seen.cached_tokens for seen in stub.seen[:30])
    assert report["prompt_tokens"] == sum(map(len, first_run))


async def test_a_gateway_tells_workers_and_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        await replay(CONVERSATIONS, "--url", gateway.url + "/v1", "--rate", "50", "--json", "--report", str(tmp_path))
    report = report_in(capsys)
    [policy] = report["policies"]
    keys = {"policy", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p95_s", "ttft_p99_s", "ttft_max_s",
            "hit_token_ratio", "ideal_hit_token_ratio", "max_mean_load", "requests", "errors", "cached_tokens",
            "prompt_tokens"}
    assert keys <= policy.keys()
    assert {"trace", "workers", "seed", "commit", "machine", "date"} <= report.keys()
    assert policy["prediction"]["compared"] == policy["requests"] == 9
    assert report["workers"] == len([stub for stub in stubs if stub.seen])
    assert policy["cached_tokens"] == sum(seen.cached_tokens for stub in stubs for seen in stub.seen) > 0
    assert report["counted_by_server"]['headstart_cached_tokens_total{source="reported"}'] == policy["cached_tokens"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert sum(row["cached_tokens"] for row in rows) == policy["cached_tokens"]
    assert len({row["request_id"] for row in rows}) == 9
    assert (tmp_path / "replay.png").stat().st_size > 0
    assert "9 answered" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("answers", ["recorded", "real"])
async def test_the_next_turn_holds_what_was_recorded_or_what_was_really_said(answers: str) -> None:
    stub = StubWorker()
    async with running(stub):
        await replay(CONVERSATIONS, "--url", stub.url, *AT_ONCE, "--answers", answers, "--name-sessions")
    turns = sorted(map(prompt_of, stub.seen), key=len)
    said = {message["content"] for message in turns[-1] if message["role"] == "assistant"}
    real = "".join(TEXT)
    assert said
    assert (said == {real}) is (answers == "real")
    assert all("x-session-id" in seen.headers and orjson.loads(seen.body)["user"] for seen in stub.seen)


async def test_arrivals_do_not_wait_for_answers() -> None:
    """No answer comes before the last request has arrived: a client that waited would hang."""
    stub, everybody = StubWorker(), asyncio.Event()
    stub.next_behaviours.extend([held_until(everybody, 12)] * 12)
    async with running(stub):
        await replay(MOONCAKE, "--url", stub.url, *AT_ONCE, "--requests", "12")
    assert everybody.is_set()


async def test_the_bound_on_open_requests_holds_and_what_it_held_up_is_counted(
        capsys: pytest.CaptureFixture[str]) -> None:
    stub, most = StubWorker(), [0, 0]
    stub.next_behaviours.extend([slow(most)] * 6)
    async with running(stub):
        await replay(MOONCAKE, "--url", stub.url, *AT_ONCE, "--requests", "6", "--max-open", "2", "--json")
    [policy] = report_in(capsys)["policies"]
    assert most[1] == 2
    assert policy["late"] >= 4
    assert policy["ttft_max_s"] > 2 * SLOW_S   # the time from when it was due


async def test_failures_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    stub = StubWorker()
    stub.next_behaviours.extend([refuse(429, "queue_full"), refuse(429, "queue_full"), refuse(500, "worker_failed"),
                                 die_mid_stream, end_without_done, never_answer, answer])
    async with running(stub):
        await replay(MOONCAKE, "--url", stub.url, *AT_ONCE, "--requests", "7", "--max-open", "1", "--timeout", "3",
                     "--json")
    report = report_in(capsys)
    assert report["errors"] == {"429 queue_full": 2, "500 worker_failed": 1, "broke off": 1, "no [DONE]": 1,
                                "timeout": 1}
    assert (report["policies"][0]["requests"], report["policies"][0]["failed"]) == (1, 6)


async def test_nothing_answered_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    stub = StubWorker()
    stub.next_behaviours.extend([refuse(503, "no_worker")] * 3)
    async with running(stub):
        await replay(MOONCAKE, "--url", stub.url, *AT_ONCE, "--requests", "3", status=1)
    assert "error 503 no_worker: 3" in capsys.readouterr().out


async def test_an_openai_server_without_any_of_our_headers(capsys: pytest.CaptureFixture[str]) -> None:
    async with plain_server() as url:
        await replay(MOONCAKE, "--url", url, "--rate", "1e6", "--requests", "5", "--prompts", "words",
                     "--openai-only", "--json")
    report = report_in(capsys)
    [policy] = report["policies"]
    assert (report["model"], policy["requests"], report["workers"], policy["prediction"]) == ("other", 5, None, None)
    assert policy["hit_token_ratio"] is None


@pytest.mark.parametrize(("arguments", "says"), [
    (["absent.jsonl", "--url", "http://h"], "No such file"), ([MOONCAKE], "--url"),
    ([MOONCAKE, "--url", "localhost"], "http://host:port"),
    ([MOONCAKE, "--url", "http://h", "--speed", "0"], "--speed"),
    ([MOONCAKE, "--url", "http://h", "--speed", "inf"], "--speed"),
    ([MOONCAKE, "--url", "http://h", "--speed", "1e-9"], "--speed should be at least 0.001"),
    ([MOONCAKE, "--url", "http://h", "--rate", "nan"], "--rate"),
    ([MOONCAKE, "--url", "http://h", "--timeout", "inf"], "--timeout"),
    ([MOONCAKE, "--url", "http://h", "--speed", "100", "--rate", "5"], "not allowed with argument --speed"),
    ([MOONCAKE, "--url", "http://h", "--block-size", "1000000000"], "--block-size"),
    ([MOONCAKE, "--url", "http://h", "--max-prompt", "1"], "--max-prompt"),
    ([MOONCAKE, "--url", "http://h", "--token-ids", "9"], "--token-ids"),
    ([MOONCAKE, "--url", "http://h", "--token-ids", "9:99999999999999999999"], "--token-ids"),
    ([MOONCAKE, "--url", "http://h", "--rate", "1e-300"], "give a higher --speed or --rate"),
    ([MOONCAKE, "--url", "http://h", "--sped", "2"], "--speed"),
    ([str(TRACES / "README"), "--url", "http://h"], "README")])
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], says: str,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_no_server_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MOONCAKE, "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert said.count("\n") == 1


# ---- servers ----------------------------------------------------------------------------------------------------

SLOW_S = 0.1


def held_until(everybody: asyncio.Event, count: int) -> Behaviour:
    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        if len(stub.seen) == count:
            everybody.set()
        await everybody.wait()
        return await answer(stub, request, seen)
    return behave


def slow(most: list[int]) -> Behaviour:
    """Takes at least SLOW_S; `most` holds how many are under way, and how many ever were."""
    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        most[0] += 1
        most[1] = max(most)
        await asyncio.sleep(SLOW_S)
        most[0] -= 1
        return await answer(stub, request, seen)
    return behave


@contextlib.asynccontextmanager
async def plain_server() -> AsyncIterator[str]:
    """Streams a word to every chat; knows neither usage nor fields that OpenAI has not."""
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "other"}]})

    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked.keys() <= {"model", "messages", "temperature", "max_tokens", "stream", "stream_options"}
        return web.Response(content_type="text/event-stream",
                            body=b'data: {"choices":[{"delta":{"content":"word"}}]}\n\ndata: [DONE]\n\n')

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
