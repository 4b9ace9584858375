"""What a client sees when workers misbehave: a table of cases over real sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.support.ended_streams import end_without_done_in_capitals, said_all, said_in_code
from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import (
    Behaviour,
    StubWorker,
    close_before_first_byte,
    die_mid_stream,
    end_without_done,
    pause,
    refuse,
    running,
    stream_one_then_hang,
)


@dataclass(frozen=True)
class Case:
    """`given`: what the first and the second worker do next (the one that is asked first takes `given[0]`)."""

    name: str
    given: Sequence[Behaviour]
    status: int
    stream: bool = False
    num_asked: int = 1
    code: str | None = None
    text: Sequence[bytes] = ()
    absent: Sequence[bytes] = ()
    headers: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


ANSWERED = (b"Hello",)
ROUTE = 'route="/v1/chat/completions",model="stub"'
UNCOUNTED = {'headstart_prompt_tokens_total{model="stub"}': 0,
             'headstart_cached_tokens_total{model="stub",source="predicted"}': 0}
SERVED = f'headstart_requests_total{{{ROUTE},code="200"}}'
CASES = [
    Case("all is well", [], 200, text=ANSWERED),
    Case("all is well, streamed", [], 200, stream=True, text=(b"Hello", b"cached_tokens", b"data: [DONE]")),
    Case("dies before the first byte: the other answers", [close_before_first_byte], 200, num_asked=2, text=ANSWERED,
         metrics={'headstart_retries_total{reason="reset"}': 1}),
    Case("dies before the first byte of a stream", [close_before_first_byte], 200, stream=True, num_asked=2,
         text=(b"Hello", b"data: [DONE]"), absent=(b"event: error",)),
    Case("everybody dies", [close_before_first_byte] * 3, 502, num_asked=3, code="worker_failed",
         metrics={f'headstart_requests_total{{{ROUTE},code="502"}}': 1}),
    Case("a 500 is another worker's chance", [refuse(500, "internal_error")], 200, num_asked=2, text=ANSWERED,
         metrics={'headstart_retries_total{reason="worker_error"}': 1}),
    Case("500 everywhere is our 502", [refuse(500, "internal_error")] * 2, 502, num_asked=2, code="worker_failed"),
    Case("503 while loading is another worker's chance", [refuse(503, "worker_loading")], 200, num_asked=2,
         text=ANSWERED),
    Case("503 everywhere is 503 no_worker", [refuse(503, "worker_loading")] * 2, 503, num_asked=2, code="no_worker",
         headers={"retry-after": "1"}),
    Case("429 is another worker's chance", [refuse(429, "queue_full", retry_after="7")], 200, num_asked=2,
         text=ANSWERED, metrics={'headstart_retries_total{reason="busy"}': 1}),
    Case("429 everywhere passes unchanged", [refuse(429, "queue_full", retry_after="7")] * 2, 429, num_asked=2,
         code="queue_full", text=(b"said the stub",), headers={"retry-after": "7"},
         metrics={'headstart_rejected_total{reason="queue_full"}': 1, **UNCOUNTED}),
    Case("a 400 passes unchanged and is not retried", [refuse(400, "context_too_long")], 400, code="context_too_long",
         text=(b"said the stub",), metrics=UNCOUNTED),
    Case("a 404 passes unchanged and is not retried", [refuse(404, "model_not_found")], 404, code="model_not_found"),
    Case("a worker that refuses the gateway's token is the operator's mistake, not the client's",
         [refuse(403, "forbidden")] * 2, 502, num_asked=2, code="worker_failed"),
    Case("dies in mid-stream", [die_mid_stream], 200, stream=True, text=(b"Hello", b"event: error", b"worker_failed"),
         absent=(b"[DONE]",), metrics={'headstart_broken_streams_total{reason="worker_failed"}': 1}),
    Case("a stream without [DONE]", [end_without_done], 200, stream=True,
         text=(b"Hello", b"event: error", b"worker_failed"), absent=(b"data: [DONE]",),
         metrics={'headstart_broken_streams_total{reason="worker_failed"}': 1}),
    *(Case(f"{how} after [DONE], tokens {'told' if told else 'untold'}: all was said",
           [said_all(told=told, hangs=how == "hangs")], 200, stream=True, text=(b"Hello", b"data: [DONE]"),
           absent=(b"event: error", b"HTTP/1.1", b"internal_error"),
           metrics={'headstart_broken_streams_total{reason="worker_failed"}': 0, SERVED: 1})
      for how in ("closes", "hangs") for told in (False, True)),
    Case("a stream by another spelling, without [DONE]", [end_without_done_in_capitals], 200, stream=True,
         text=(b"Hello", b"event: error", b"worker_failed"), absent=(b"data: [DONE]",),
         metrics={'headstart_broken_streams_total{reason="worker_failed"}': 1}),
    Case("a coded answer, which nobody asked for, is another worker's chance", [said_in_code(stream=False)], 200,
         num_asked=2, text=ANSWERED, metrics={'headstart_retries_total{reason="worker_error"}': 1}),
    Case("a coded stream is another worker's chance", [said_in_code(stream=True)], 200, stream=True, num_asked=2,
         text=(b"Hello", b"data: [DONE]")),
    Case("silent for a while: comments keep the connection", [pause(0.3)], 200, stream=True,
         text=(b"\n\n: keep-alive\n\ndata:", b"data: [DONE]"), absent=(b"event: error",)),
    Case("silent inside an event: no comment may tear it", [pause(0.3, torn=True)], 200, stream=True,
         text=(b"data: [DONE]",), absent=(b": keep-alive", b"event: error")),
    Case("silent for good: the stream ends with an error", [stream_one_then_hang], 200, stream=True,
         text=(b"Hello", b"event: error", b"worker_timeout"),
         metrics={'headstart_broken_streams_total{reason="worker_timeout"}': 1}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_what_the_client_sees(case: Case) -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs), keepalive_s=0.1,
                                                chunk_gap_timeout_s=0.8) as gateway:
        await gateway.until_exact(num_workers=2)
        script = list(case.given)
        for stub in stubs:  # whoever is asked takes the next line of the one script
            stub.next_behaviours = _Shared(script)
        answer = await gateway.chat(stream=case.stream)
        assert (answer.status, answer.error.get("code")) == (case.status, case.code)
        assert sum(len(stub.seen) for stub in stubs) == case.num_asked
        for text in case.text:
            assert text in answer.body
        for text in case.absent:
            assert text not in answer.body
        assert answer.headers.items() >= case.headers.items()
        for name, value in case.metrics.items():
            assert await gateway.metric(name) == value, name
        await assert_nothing_is_left(gateway)


class _Shared:
    """One script for both stubs: a deque that they take from together."""

    def __init__(self, script: list[Behaviour]) -> None:
        self._script = script

    def __bool__(self) -> bool:
        return bool(self._script)

    def popleft(self) -> Behaviour:
        return self._script.pop(0)


async def assert_nothing_is_left(gateway: GatewayUnderTest) -> None:
    """However a request ended, its booking is released."""
    assert [(await gateway.worker(index))["inflight"] for index in range(2)] == [0, 0]


async def test_a_worker_that_refuses_to_connect_is_passed_over() -> None:
    alive = StubWorker(worker_token=WORKER_TOKEN)
    dying = StubWorker(worker_token=WORKER_TOKEN)
    async with running(alive):
        await dying.start()
        # A long poll interval: the gateway learns of the death by the request that fails, not by the poll.
        async with running_gateway(dying.url, alive.url, health_interval_s=3.0) as gateway:
            await gateway.until_exact(num_workers=2)
            for number in range(100):
                text = f"{number}: a prompt that one of the workers holds, long enough for several blocks of cache."
                if (await gateway.chat(text)).headers["x-headstart-worker"] == dying.url.removeprefix("http://"):
                    break
            await dying.stop()
            for _ in range(3):
                assert (await gateway.chat(text)).status == 200
            await gateway.until(lambda: _has_state(gateway, 0, "unready"), "the dead worker is unready")


async def _has_state(gateway: GatewayUnderTest, index: int, state: str) -> bool:
    return bool((await gateway.worker(index))["state"] == state)


async def test_without_any_worker_there_is_one_clear_answer() -> None:
    stub = await StubWorker().start()
    await stub.stop()
    async with running_gateway(stub.url) as gateway:
        answer = await gateway.chat()
        assert (answer.status, answer.error["code"]) == (503, "no_worker")
        assert (await gateway.send("GET", "/readyz")).status == 503
        assert (await gateway.send("GET", "/livez")).status == 200
        detail = (await gateway.until(lambda: _detail(gateway), "the poll has looked"))
        assert "start the worker, or correct --worker" in detail


async def _detail(gateway: GatewayUnderTest) -> str:
    detail = str((await gateway.worker())["detail"])
    return detail if "cannot be reached" in detail else ""
