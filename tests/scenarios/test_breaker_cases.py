"""Breakers in a running gateway: what opens one, what does not, and how it closes, over real sockets."""

from __future__ import annotations

from collections import deque

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import (
    Behaviour,
    StubWorker,
    close_before_first_byte,
    refuse,
    running,
    stream_one_then_hang,
)

FAILURES = 3
SETTINGS = {"breaker_failures": FAILURES, "breaker_open_s": 1.0, "max_retries": 2}


async def state_of(gateway: GatewayUnderTest, stub: StubWorker) -> float:
    return await gateway.metric(f'headstart_breaker_state{{worker="{stub.url.removeprefix("http://")}"}}')


class _Always:
    """An endless script."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    def popleft(self) -> Behaviour:
        return self._behaviour


async def fill(gateway: GatewayUnderTest, bad: StubWorker, *, times: int, stream: bool = False) -> None:
    """Ask until the bad worker has been asked so often: prompts differ, so that it is nobody's holder."""
    before, number = len(bad.seen), 0
    while len(bad.seen) - before < times:
        number += 1
        assert number < 200, "the bad worker is not asked"
        await gateway.chat(f"{before} {number} a prompt of its own", stream=stream)


async def test_failures_in_a_row_open_it_a_probe_closes_it() -> None:
    good, bad = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    async with running(good, bad), running_gateway(good.url, bad.url, **SETTINGS) as gateway:
        await gateway.until_exact(num_workers=2)
        for behaviour in (refuse(500, "internal_error"), close_before_first_byte):
            bad.next_behaviours = _Always(behaviour)  # type: ignore[assignment]
            num_before = len(bad.seen)
            while await state_of(gateway, bad) != 2:
                await fill(gateway, bad, times=1)
            # A kept connection that dies without a byte is tried once more on a fresh one, which is one failure.
            assert FAILURES <= len(bad.seen) - num_before <= 2 * FAILURES
            num_asked = len(bad.seen)
            for number in range(20):
                assert (await gateway.chat(f"{number} while it is open")).status == 200
            assert len(bad.seen) == num_asked or await state_of(gateway, bad) != 2
            bad.next_behaviours = deque()
            await gateway.until(lambda: _is(gateway, bad, 1), "half open")
            await fill(gateway, bad, times=1)
            assert await state_of(gateway, bad) == 0
        assert await state_of(gateway, good) == 0


async def _is(gateway: GatewayUnderTest, stub: StubWorker, state: float) -> bool:
    return await state_of(gateway, stub) == state


async def test_lost_streams_open_it_too() -> None:
    good, bad = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    async with running(good, bad), running_gateway(good.url, bad.url, **SETTINGS, chunk_gap_timeout_s=0.1) as gateway:
        await gateway.until_exact(num_workers=2)
        bad.next_behaviours = _Always(stream_one_then_hang)  # type: ignore[assignment]
        await fill(gateway, bad, times=FAILURES, stream=True)
        assert await state_of(gateway, bad) == 2


async def test_a_clients_mistakes_and_a_busy_worker_never_open_it() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, **SETTINGS) as gateway:
        await gateway.until_exact()
        for status, code in ((400, "invalid_request"), (404, "model_not_found"), (429, "queue_full"),
                             (503, "worker_loading"), (403, "forbidden")):
            stub.next_behaviours.extend([refuse(status, code)] * (2 * FAILURES))
            for _ in range(2 * FAILURES):
                await gateway.chat()
            stub.next_behaviours.clear()
            assert await state_of(gateway, stub) == 0, status


async def test_the_only_worker_is_asked_although_its_breaker_is_open() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, **{**SETTINGS, "breaker_open_s": 60.0,
                                                           "breaker_open_max_s": 60.0}) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.extend([refuse(500, "internal_error")] * FAILURES)
        for _ in range(FAILURES):
            assert (await gateway.chat()).status == 502
        assert await state_of(gateway, stub) == 2
        assert (await gateway.chat()).status == 200
        assert await state_of(gateway, stub) == 0


async def test_a_new_life_begins_with_a_closed_one() -> None:
    good, bad = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    async with running(good, bad), running_gateway(good.url, bad.url, **{**SETTINGS, "breaker_open_s": 60.0,
                                                                         "breaker_open_max_s": 60.0}) as gateway:
        await gateway.until_exact(num_workers=2)
        bad.next_behaviours = _Always(refuse(500, "internal_error"))  # type: ignore[assignment]
        await fill(gateway, bad, times=FAILURES)
        assert await state_of(gateway, bad) == 2
        await bad.stop()
        await bad.start()
        await gateway.until(lambda: _is(gateway, bad, 0), "closed in its new life")
