"""The gateway's HTTP surface: errors in OpenAI's shape, models, helpers, ops routes, admin token, start and drain."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN, running_gateway
from tests.support.stub_worker import StubWorker, never_answer, pause, running, stream_one_then_hang
from worker.prompt.requests import parse_chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


@dataclass(frozen=True)
class Mistake:
    name: str
    body: bytes
    status: int = 400
    code: str = "invalid_request"
    param: str | None = None
    method: str = "POST"
    path: str = CHAT


MISTAKES = [
    Mistake("malformed JSON", b"{"),
    Mistake("not an object", b"[1]"),
    Mistake("empty body", b""),
    Mistake("invalid UTF-8", b'{"model":"stub\xff",' + MESSAGES + b"}"),
    Mistake("duplicate key", b'{"model":"stub","model":"stub",' + MESSAGES + b"}", param="model"),
    Mistake("wrong type", b'{"model":"stub","max_tokens":"5",' + MESSAGES + b"}", param="max_tokens"),
    Mistake("NaN temperature", b'{"model":"stub","temperature":NaN,' + MESSAGES + b"}", param="temperature"),
    Mistake("max_tokens 0", b'{"model":"stub","max_tokens":0,' + MESSAGES + b"}", param="max_tokens"),
    Mistake("max_tokens -1", b'{"model":"stub","max_tokens":-1,' + MESSAGES + b"}", param="max_tokens"),
    Mistake("no messages", b'{"model":"stub","messages":[]}', param="messages"),
    Mistake("tools that the template ignores", b'{"model":"stub","tools":[{"type":"function","function":'
            b'{"name":"f"}}],' + MESSAGES + b"}", param="tools"),
    Mistake("unknown model", b'{"model":"nope",' + MESSAGES + b"}", 404, "model_not_found", "model"),
    Mistake("token id out of the vocabulary", b'{"model":"stub","prompt":[256]}', param="prompt",
            path="/v1/completions"),
    Mistake("too large", b" " * 70_000, 413, "body_too_large"),
    Mistake("unknown path", b"", 404, "not_found", path="/v2/chat"),
    Mistake("unknown method", b"", 405, "method_not_allowed", method="GET"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
async def test_a_clients_mistake_is_named_and_reaches_no_worker(mistake: Mistake) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, max_body_bytes=65_536) as gateway:
        await gateway.until_exact()
        answer = await gateway.send(mistake.method, mistake.path, body=mistake.body)
        assert (answer.status, answer.error["code"]) == (mistake.status, mistake.code)
        assert answer.error["param"] == mistake.param
        assert answer.error["message"]
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["x-request-id"]
        assert not stub.seen
        assert (await gateway.chat()).status == 200, "the next request is served"


async def test_a_prompt_longer_than_every_context_is_refused_before_any_worker() -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN, max_context=context) for context in (100, 300)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        small, large = stubs
        room = 300 - len(small.renderer.chat(parse_chat(b'{"model":"m",' + MESSAGES + b"}"))) + len("hi")
        for length, says in ((room, "300 tokens long"), (10_000, "at least 100")):
            answer = await gateway.chat("x" * length)
            assert (answer.status, answer.error["param"]) == (400, "messages")
            assert says in answer.error["message"]
            assert "300 tokens, of which" in answer.error["message"]
        answer = await gateway.send("POST", "/v1/completions", payload={"model": "stub", "prompt": [1] * 300})
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert not small.seen + large.seen
        for _ in range(4):
            assert (await gateway.chat("x" * (room - 1))).status == 200
            assert (await gateway.chat("x", max_tokens=150)).status == 200
        assert (len(small.seen), len(large.seen)) == (0, 8)
        assert await gateway.metric('headstart_prompt_tokens_total{model="stub"}') == sum(
            len(seen.prompt) for seen in large.seen)


async def test_a_100_mb_body_without_a_length_is_refused_on_the_way() -> None:
    async with running_gateway("http://127.0.0.1:1", max_body_bytes=1 << 20) as gateway:
        async def chunks():  # type: ignore[no-untyped-def]
            for _ in range(100):
                yield b"x" * (1 << 20)

        async with gateway.session.post(gateway.url + CHAT, data=chunks()) as response:
            assert response.status == 413


async def test_curls_expect_header_is_answered() -> None:
    async with (running_gateway("http://127.0.0.1:1") as gateway,
                gateway.session.post(gateway.url + CHAT, data=b"{", expect100=True) as response):
        assert response.status == 400


async def test_models_and_helpers() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, root_path="/llm") as gateway:
        await gateway.until(lambda: _is_ready(gateway), "ready")
        listed = await gateway.send("GET", "/llm/v1/models")
        assert b'"id":"stub"' in listed.body
        assert b'"max_model_len":4096' in listed.body
        assert (await gateway.send("GET", "/v1/models/stub")).status == 200
        missing = await gateway.send("GET", "/v1/models/org%2Fother")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert "org/other" in missing.error["message"]
        tokens = await gateway.send("POST", "/tokenize", payload={"prompt": "aé"})
        assert b'"count":3' in tokens.body
        text = await gateway.send("POST", "/detokenize", payload={
            "tokens": stub.renderer.tokenizer.encode("aé", add_special_tokens=False)})
        assert text.body == '{"prompt":"aé"}'.encode()


async def _is_ready(gateway) -> bool:  # type: ignore[no-untyped-def]
    return bool((await gateway.send("GET", "/readyz")).status == 200)


async def test_admin_routes_want_the_token() -> None:
    async with running_gateway("http://127.0.0.1:1") as gateway:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic admin"},
                        {"Authorization": "Bearer"}, {"Authorization": "Bearer admi\xf6n"}):
            for method, path in (("GET", "/admin/workers"), ("POST", "/admin/explain"),
                                 ("POST", "/admin/workers/x/drain"), ("POST", "/admin/workers/x/undrain")):
                answer = await gateway.send(method, path, headers=headers)
                assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
        assert (await gateway.send("GET", "/admin/workers", headers=ADMIN)).status == 200
        for verb in ("drain", "undrain"):
            assert (await gateway.send("POST", f"/admin/workers/x/{verb}", headers=ADMIN)).status == 404
        assert (await gateway.send("POST", "/admin/workers/x/halt", headers=ADMIN)).status == 405


async def test_without_a_configured_token_a_private_file_has_one(tmp_path: Path) -> None:
    file = tmp_path / "state" / "token"
    async with running_gateway("http://127.0.0.1:1", admin_token="", admin_token_file=file) as gateway:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        token = file.read_text().strip()
        assert len(token) >= 24
        headers = {"Authorization": f"Bearer {token}"}
        assert (await gateway.send("GET", "/admin/workers", headers=headers)).status == 200
        assert (await gateway.send("GET", "/admin/workers", headers={"Authorization": "Bearer "})).status == 401
    assert not file.exists(), "a token of a gateway that has ended is of no use"


async def test_a_token_that_its_file_holds_already_is_the_token_and_stays(tmp_path: Path) -> None:
    """A mounted secret, or what a gateway that was killed left behind."""
    file = tmp_path / "token"
    file.write_text("the-mounted-secret\n")
    async with running_gateway("http://127.0.0.1:1", admin_token="", admin_token_file=file) as gateway:
        headers = {"Authorization": "Bearer the-mounted-secret"}
        assert (await gateway.send("GET", "/admin/workers", headers=headers)).status == 200
    assert file.read_text() == "the-mounted-secret\n"


async def test_a_token_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    async with running_gateway("http://127.0.0.1:1", admin_token="", admin_token_file=file) as gateway:
        assert (await gateway.send("GET", "/admin/workers", headers={"Authorization": "Bearer x"})).status == 401
    assert file.read_bytes() == b"\xff\xfe"


async def test_a_token_file_that_another_gateway_has_replaced_stays(tmp_path: Path) -> None:
    file = tmp_path / "token"
    async with running_gateway("http://127.0.0.1:1", admin_token="", admin_token_file=file):
        file.write_text("another's")
    assert file.read_text() == "another's"


async def test_a_token_file_that_cannot_be_written_closes_the_admin_routes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with running_gateway("http://127.0.0.1:1", admin_token="",
                               admin_token_file=tmp_path / "file" / "token") as gateway:
        assert (await gateway.send("GET", "/livez")).status == 200
        for given in ("Bearer ", "Bearer x"):
            assert (await gateway.send("GET", "/admin/workers", headers={"Authorization": given})).status == 401


async def test_explain_decides_and_sends_nothing() -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        body = {"model": "stub", "messages": [{"role": "user", "content": "A question of some length. " * 5}]}
        answer = await gateway.send("POST", "/admin/explain", payload=body, headers=ADMIN)
        assert answer.status == 200
        assert answer.body.count(b'"endpoint_id"') == 3  # the decision and both candidates
        for candidate in json.loads(answer.body)["candidates"]:
            assert (candidate["prefill_tokens_per_s"], candidate["decode_step_s"]) == (1000.0, 0.01)
            assert (candidate["reported_prefill_tokens_per_s"], candidate["reported_decode_step_s"]) == (1000.0, 0.01)
        assert not any(stub.seen for stub in stubs)
        assert (await gateway.worker())["speculative_blocks"] == 0


@pytest.mark.parametrize(("body", "status", "says"), [
    ({"prompt": "Some text. " * 9}, 200, "prompt_tokens"), ({"input": "Some text. " * 9}, 200, "prompt_tokens"),
    ({}, 400, "messages (chat), prompt (completions) or input (responses)"), ({"messages": []}, 400, "messages")])
async def test_explain_knows_the_route_by_its_prompt(body: dict[str, object], status: int, says: str) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        answer = await gateway.send("POST", "/admin/explain", payload={"model": "stub", **body}, headers=ADMIN)
    assert answer.status == status
    assert says in answer.body.decode()


async def test_a_list_of_prompts_goes_to_who_holds_its_longest() -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        for number in range(4):
            long = [10 + number] * 320
            first = await gateway.send("POST", COMPLETIONS, payload={"model": "stub", "prompt": long})
            for prompts in ([[9] * 40, long], [long, [9] * 40]):
                answer = await gateway.send("POST", COMPLETIONS, payload={"model": "stub", "prompt": prompts})
                assert answer.headers["x-headstart-worker"] == first.headers["x-headstart-worker"]
                assert answer.headers["x-headstart-matched-tokens"] == "319"


async def test_predictions_are_shown_and_measured_and_a_session_keeps_its_worker() -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        body = {"model": "stub", "stream": True, "prompt_cache_key": "mine",
                "messages": [{"role": "user", "content": "hi"}]}
        served = {(await gateway.send("POST", CHAT, payload=body)).headers["x-headstart-worker"] for _ in range(8)}
        assert len(served) == 1
        explained = json.loads((await gateway.send("POST", "/admin/explain", payload=body, headers=ADMIN)).body)
        by_id = {cost["endpoint_id"]: cost for cost in explained["candidates"]}
        assert by_id[served.pop()]["session_s"] > 0
        assert all(cost["first_token_s"] >= cost["prefill_s"] > 0 for cost in by_id.values())
        metrics = (await gateway.send("GET", "/metrics")).body.decode()
        assert "headstart_first_token_observed_to_predicted_ratio_count 8.0" in metrics


async def test_ops_port_takes_the_operators_routes_off_the_main_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ops_port = probe.getsockname()[1]
    async with running_gateway("http://127.0.0.1:1", ops_port=ops_port) as gateway:
        assert [(await gateway.send("GET", path, headers=ADMIN)).status
                for path in ("/livez", "/metrics", "/admin/workers")] == [200, 404, 404]
        for path in ("/livez", "/metrics", "/admin/workers"):
            async with gateway.session.get(f"http://127.0.0.1:{ops_port}{path}", headers=ADMIN) as response:
                assert response.status == 200
        async with gateway.session.post(f"http://127.0.0.1:{ops_port}{CHAT}") as response:
            assert response.status == 404


async def test_cors_for_configured_origins_only() -> None:
    async with running_gateway("http://127.0.0.1:1", cors_origins=("https://app.example",)) as gateway:
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            answer = await gateway.send("OPTIONS", CHAT, headers={"Origin": origin})
            assert answer.status == 204
            assert ("access-control-allow-origin" in answer.headers) is allowed
            for method, path in (("GET", "/v1/models"), ("GET", "/nowhere"), ("POST", CHAT)):
                answer = await gateway.send(method, path, headers={"Origin": origin})
                assert ("access-control-allow-origin" in answer.headers) is allowed, "errors can be read as well"
                assert answer.headers["vary"] == "Origin", "or a cache gives one origin's answer to the other"
        for wanted, granted in (("authorization, x-stainless-lang,x-more", True), ("a b", False), ("", False)):
            answer = await gateway.send("OPTIONS", CHAT, headers={
                "Origin": "https://app.example", "Access-Control-Request-Headers": wanted})
            assert (answer.headers["access-control-allow-headers"] == wanted) is granted


async def test_expose_routing_can_be_turned_off() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, expose_routing=False) as gateway:
        await gateway.until_exact()
        answer = await gateway.chat()
        assert not [name for name in answer.headers if name.startswith("x-headstart")]


async def test_model_names_of_clients_make_no_series() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        await gateway.send("POST", CHAT, payload={"model": "made-up", "messages": [{"role": "user", "content": "x"}]})
        assert b"made-up" not in (await gateway.send("GET", "/metrics")).body
        assert await gateway.metric(f'headstart_requests_total{{route="{CHAT}",model="other",code="404"}}') == 1


async def test_draining_finishes_streams_and_then_is_gone() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, drain_s=20.0) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(pause(0.8))
        streaming = asyncio.create_task(gateway.chat(stream=True))
        await gateway.until(lambda: _seen(stub, 1), "the stream runs")
        draining = asyncio.create_task(gateway.gateway.drain(asyncio.Event(), delay_s=0.3))
        await asyncio.sleep(0)
        assert (await gateway.send("GET", "/readyz")).status == 503
        late = await gateway.chat()
        assert late.status == 200, "requests are still accepted during drain_delay_s"
        assert late.headers.get("connection") == "close"
        assert b"[DONE]" in (await streaming).body
        await draining
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", gateway.gateway.port)


async def test_what_outlives_the_drain_is_told_so_before_it_is_cut() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, drain_s=0.1) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.extend([stream_one_then_hang, never_answer])
        streaming = asyncio.create_task(gateway.chat(stream=True))
        await gateway.until(lambda: _seen(stub, 1), "the stream runs")
        waiting = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: _seen(stub, 2), "the other request waits")
        await asyncio.sleep(0.1)
        metrics, began_at = gateway.gateway.state.metrics, asyncio.get_running_loop().time()
        await gateway.gateway.drain(asyncio.Event(), delay_s=0.0)
        await gateway.gateway.aclose()
        stream, whole = await streaming, await waiting
        assert asyncio.get_running_loop().time() - began_at < 1.5
        assert b"Hello" in stream.body
        assert b"event: error" in stream.body
        assert b"gateway is stopping" in stream.body
        assert b"worker_failed" in stream.body
        assert b"[DONE]" not in stream.body
        assert (whole.status, whole.error["code"]) == (502, "worker_failed")
        text = metrics.render().decode()
        assert "headstart_client_disconnects_total 0.0" in text
        assert 'headstart_broken_streams_total{reason="worker_failed"} 1.0' in text


async def _seen(stub: StubWorker, number: int) -> bool:
    return len(stub.seen) >= number


def gateway_process(**settings: object) -> subprocess.Popen[str]:
    """A process that runs a gateway and ends with its exit status: run() owns signals and logging."""
    program = ("import sys; from pathlib import PosixPath; from gateway.config import GatewayConfig; "
               "from gateway.server.app import run; "
               f"sys.exit(run(GatewayConfig(**{ {'admin_token': 'x', **settings}!r})))")
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


def test_a_port_in_use_is_one_line_and_exit_2(tmp_path: Path) -> None:
    """And the token file belongs to whoever has the port."""
    file = tmp_path / "token"
    file.write_text("the running gateway's")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = gateway_process(port=taken.getsockname()[1], admin_token="", admin_token_file=file)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert file.read_text() == "the running gateway's"
    assert len(err.strip().splitlines()) == 1
    assert "Address already in use" in err
    assert "--port" in err


def test_a_policy_that_there_is_not_is_exit_2() -> None:
    process = gateway_process(port=0, policy="roundrobin")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert len(err.strip().splitlines()) == 1
    assert "round_robin" in err


@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGTERM, 0.05), (signal.SIGINT, 60.0)])
def test_a_signal_ends_the_process_with_0(number: signal.Signals, delay_s: float) -> None:
    """Ctrl-C does not wait for load balancers to notice."""
    process = gateway_process(port=0, drain_delay_s=delay_s, drain_s=1.0)
    assert process.stderr is not None
    first, second = process.stderr.readline(), process.stderr.readline()
    assert '"no_workers"' in first
    assert "--worker" in first
    assert "gateway_started" in second
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
