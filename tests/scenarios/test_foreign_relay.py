"""Messages and Responses when workers misbehave: the gateway's word reaches the client in its own API's shape."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import orjson
import pytest

from tests.support.gateway_in_process import GatewayUnderTest, running_gateway
from tests.support.stub_worker import (
    TEXT,
    Behaviour,
    StubWorker,
    die_mid_stream,
    end_without_done,
    pause,
    refuse,
    running,
)

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "stub", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "stub", "input": "hi"},
}


async def ask(gateway: GatewayUnderTest, path: str, *, stream: bool) -> tuple[int, dict[str, str], bytes]:
    answer = await gateway.send("POST", path, payload={**BODIES[path], "stream": stream})
    return answer.status, answer.headers, answer.body


def names(body: bytes) -> list[str]:
    return [line.removeprefix(b"event: ").decode() for line in body.splitlines() if line.startswith(b"event: ")]


@pytest.mark.parametrize("path", BODIES)
async def test_engines_see_chat(path: str) -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        status, _, body = await ask(gateway, path, stream=False)
        assert status == 200
        assert "".join(TEXT) in body.decode()
        status, headers, body = await ask(gateway, path, stream=True)
        assert headers["content-type"].startswith("text/event-stream")
        assert names(body)[-1] in ("message_stop", "response.completed")
        assert b"[DONE]" not in body
        assert [seen.path for seen in stub.seen] == ["/v1/chat/completions"] * 2
        assert orjson.loads(stub.seen[1].body)["stream_options"] == {"include_usage": True}
        assert await gateway.metric(f'headstart_requests_total{{route="{path}",model="stub",code="200"}}') == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_response_repeats_may_hold_any_integer(stream: bool) -> None:
    stub, huge = StubWorker(), 10**30
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        answer = await gateway.send("POST", "/v1/responses", payload={
            **BODIES["/v1/responses"], "stream": stream, "metadata": {"a": huge}})
        assert answer.status == 200
        assert b'"metadata":{"a":%d}' % huge in answer.body


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("behave", [die_mid_stream, end_without_done])
async def test_a_stream_that_breaks_off_ends_in_an_error_of_its_api(path: str, behave: Behaviour) -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(behave)
        _, _, body = await ask(gateway, path, stream=True)
        told = names(body)
        assert told[-1] == ("error" if path == "/v1/messages" else "response.failed")
        assert "error" in told
        assert "message_stop" not in told
        assert b"worker_failed" in body


async def test_silence_is_bridged_by_pings() -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(stub.url, keepalive_s=0.05) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(pause(0.4))
        _, _, body = await ask(gateway, "/v1/messages", stream=True)
        assert names(body).count("ping") > 1


async def test_refusals_are_what_each_client_expects() -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(stub.url, max_retries=0) as gateway:
        await gateway.until_exact()
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as messages:
            stub.next_behaviours.append(refuse(429, "queue_full", Retry_After="7"))
            with pytest.raises(anthropic.RateLimitError) as busy:
                await messages.messages.create(**BODIES["/v1/messages"])
            assert busy.value.response.headers["retry-after"] == "7"
            assert isinstance(busy.value.body, dict)
            assert busy.value.body["error"]["type"] == "rate_limit_error"
            stub.next_behaviours.append(refuse(400, "invalid_request"))
            with pytest.raises(anthropic.BadRequestError) as bad:
                await messages.messages.create(**BODIES["/v1/messages"])
            assert isinstance(bad.value.body, dict)
            assert bad.value.body["type"] == "error"
            stub.next_behaviours.append(refuse(500, "x"))
            with pytest.raises(anthropic.InternalServerError) as failed:
                await messages.messages.create(**BODIES["/v1/messages"])
            assert isinstance(failed.value.body, dict)
            assert failed.value.body["error"]["type"] == "api_error"
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as responses:
            stub.next_behaviours.append(refuse(400, "invalid_request"))
            with pytest.raises(openai.BadRequestError, match="said the stub"):
                await responses.responses.create(**BODIES["/v1/responses"])


async def test_without_a_key_the_refusal_has_its_shape_too() -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(
            stub.url, api_keys=("acme=secret-key-of-acme-0123456789",), salt_secret="s") as gateway:
        await gateway.until_exact()
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**BODIES["/v1/messages"])
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == "authentication_error"
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="secret-key-of-acme-0123456789") as client:
            assert (await client.messages.create(**BODIES["/v1/messages"])).content[0].type == "text"
