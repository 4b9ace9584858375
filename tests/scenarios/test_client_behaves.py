"""What reaches the worker, and what happens when the client leaves: over real sockets."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from gateway.routing.load_ledger import NO_LOAD
from gateway.server.request_record import STAGES
from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import (
    Behaviour,
    StubWorker,
    close_before_first_byte,
    never_answer,
    pause,
    refuse,
    running,
    stream_one_then_hang,
)

LONG_TEXT = "The same long beginning of a conversation, again and again. " * 8


async def test_the_second_request_finds_what_the_first_one_left() -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(3)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=3)
        first = await gateway.chat(LONG_TEXT)
        second = await gateway.chat(LONG_TEXT + "And a new end.")
        assert first.headers["x-headstart-matched-tokens"] == "0"
        assert second.headers["x-headstart-worker"] == first.headers["x-headstart-worker"]
        holder = next(stub for stub in stubs if stub.seen)
        assert int(second.headers["x-headstart-matched-tokens"]) == holder.seen[1].cached_tokens > 400
        assert await gateway.metric('headstart_hit_error_tokens_count{direction="over"}') == 0
        assert await gateway.metric('headstart_cached_tokens_total{model="stub",source="reported"}') > 400
        assert await gateway.metric("headstart_session_hit_ratio") == 1.0
        for stage in STAGES:
            assert await gateway.metric(f'headstart_overhead_seconds_count{{stage="{stage}"}}') == 2, stage
        assert await gateway.metric(
            f'headstart_decisions_total{{worker="{first.headers["x-headstart-worker"]}",reason="prefix"}}') == 1


@pytest.mark.parametrize("behaviour", [close_before_first_byte, refuse(500, "x"), refuse(400, "x"), refuse(429, "x")])
async def test_a_bet_on_a_request_that_was_not_taken_is_taken_back(behaviour: Behaviour) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, speculative_ttl_s=60.0) as gateway:
        await gateway.until_exact()
        stub.publishing = False  # no event confirms or replaces a bet
        stub.next_behaviours.extend([behaviour] * 3)
        assert (await gateway.chat(LONG_TEXT)).status != 200
        assert (await gateway.worker())["speculative_blocks"] == 0
        stub.next_behaviours.clear()
        await gateway.chat(LONG_TEXT)
        assert (await gateway.worker())["speculative_blocks"] > 20


async def test_a_bet_bridges_the_time_until_the_events_and_then_expires() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, speculative_ttl_s=0.2) as gateway:
        await gateway.until_exact()
        stub.publishing = False
        matched = [int((await gateway.chat(LONG_TEXT)).headers["x-headstart-matched-tokens"]) for _ in range(2)]
        assert matched[0] == 0 < matched[1]
        await gateway.until(lambda: _no_bets(gateway), "the bets expire")
        assert int((await gateway.chat(LONG_TEXT)).headers["x-headstart-matched-tokens"]) == 0
        # A bet may fail without being wrong: anything from the confirmed to the predicted match is no error.
        assert await gateway.metric('headstart_hit_error_tokens_count{direction="over"}') == 0


async def test_a_bet_stays_while_its_request_waits_at_the_worker() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, speculative_ttl_s=0.01) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(never_answer)
        waiting = asyncio.create_task(gateway.chat(LONG_TEXT))
        await gateway.until(lambda: _asked(stub), "the worker has the request")
        await asyncio.sleep(1.5)   # longer than its prompt was expected to take
        assert int((await gateway.chat(LONG_TEXT)).headers["x-headstart-matched-tokens"]) > 400
        waiting.cancel()
        await gateway.until(lambda: _no_bets(gateway), "a bet on a request whose client left expires")


async def _no_bets(gateway: GatewayUnderTest) -> bool:
    return bool((await gateway.worker())["speculative_blocks"] == 0)


async def test_a_worker_that_is_alone_gets_a_second_try_after_a_reset() -> None:
    """A pooled connection that the worker was just closing looks like this."""
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(close_before_first_byte)
        assert (await gateway.chat()).status == 200
        assert len(stub.seen) == 2


async def test_a_request_on_a_worker_that_stops_answering_is_another_ones() -> None:
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        for stub in stubs:
            stub.next_behaviours.append(never_answer)
        began_at = asyncio.get_running_loop().time()
        asking = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: _one_asked(stubs), "a worker has the request")
        frozen, other = sorted(stubs, key=lambda stub: not stub.seen)
        frozen.may_tell.clear()  # as one that was sent SIGSTOP
        other.next_behaviours.clear()
        answer = await asking
        assert answer.status == 200
        assert asyncio.get_running_loop().time() - began_at < 10.0
        assert await gateway.metric('headstart_retries_total{reason="unready"}') == 1
        frozen.may_tell.set()


async def _one_asked(stubs: list[StubWorker]) -> bool:
    return any(stub.seen for stub in stubs)


async def test_a_client_that_leaves_before_the_first_byte_frees_the_worker() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(never_answer)
        leaving = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: _asked(stub), "the worker has the request")
        assert (await gateway.worker())["inflight"] == 1
        leaving.cancel()
        await asyncio.wait_for(stub.seen[0].left_early.wait(), 10)
        await gateway.until(lambda: _is_idle(gateway), "the booking is released")
        assert await gateway.metric("headstart_client_disconnects_total") == 1
        assert await gateway.metric(
            'headstart_requests_total{route="/v1/chat/completions",model="stub",code="499"}') == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_stops_counting_as_queued_when_it_should_be_computed(stream: bool) -> None:
    """A stream says so by its first byte; an answer in one piece says nothing until the end."""
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(stream_one_then_hang if stream else never_answer)
        asking = asyncio.create_task(gateway.chat("x" * 250, stream=stream))
        await gateway.until(lambda: _asked(stub), "the worker has the request")
        worker_id, ledger = (await gateway.worker())["id"], gateway.gateway.state.ledger

        async def is_decoding() -> bool:
            load = ledger.load(worker_id)
            assert load.num_inflight == 1
            return load.queued_prefill_tokens == 0 and load.decode_context_tokens > 250

        await gateway.until(is_decoding, "the prompt counts as context")
        asking.cancel()
        await gateway.until(lambda: _is_idle(gateway), "the booking is released")
        assert ledger.load(worker_id) == NO_LOAD


async def test_a_client_that_leaves_in_mid_stream_frees_the_worker() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        stub.next_behaviours.append(stream_one_then_hang)
        body = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert b"Hello" in await response.content.readany()
            response.close()
        await asyncio.wait_for(stub.seen[0].left_early.wait(), 10)
        await gateway.until(lambda: _is_idle(gateway), "the booking is released")


async def _asked(stub: StubWorker) -> bool:
    return bool(stub.seen)


async def _is_idle(gateway: GatewayUnderTest) -> bool:
    return bool((await gateway.worker())["inflight"] == 0)


async def test_credentials_and_internal_headers_of_the_client_stay_here() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        answer = await gateway.chat(headers={
            "Authorization": "Bearer the-clients", "x-headstart-salt": "00ff", "x-headstart-tenant": "boss",
            "x-gateway-destination-endpoint": "10.0.0.1:1", "x-request-id": "mine-1", "traceparent": traceparent})
        seen = stub.seen[0].headers
        assert "authorization" not in seen
        assert seen["x-headstart-worker-token"] == WORKER_TOKEN
        assert not {"x-headstart-salt", "x-headstart-tenant", "x-gateway-destination-endpoint"} & seen.keys()
        assert seen["x-request-id"] == answer.headers["x-request-id"] == "mine-1"
        assert seen["traceparent"] == traceparent


async def test_an_unusable_request_id_is_replaced() -> None:
    async with running_gateway("http://127.0.0.1:1") as gateway:
        answer = await gateway.send("GET", "/livez", headers={"x-request-id": "a b" * 100})
        assert len(answer.headers["x-request-id"]) == 32


async def test_salts_keep_equal_prompts_apart() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        matched = [int((await gateway.chat(LONG_TEXT, **salt)).headers["x-headstart-matched-tokens"])
                   for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})]
        assert matched[:3] == [0, 0, 0]
        assert matched[3] == stub.seen[3].cached_tokens > 0
        assert matched[4] == stub.seen[4].cached_tokens > 0
        assert all(seen.internal for seen in stub.seen)
        salts = [seen.headers.get("x-headstart-salt") for seen in stub.seen]
        assert salts[0] is None
        assert salts[1] == salts[3] != salts[2]
        assert len(bytes.fromhex(str(salts[1]))) == 32


async def test_without_a_shared_token_the_worker_gets_the_clients_bytes() -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(stub.url, worker_token="") as gateway:
        await gateway.until_exact()
        for expect_match in (False, True):
            answer = await gateway.chat(LONG_TEXT, cache_salt="s")
            assert (int(answer.headers["x-headstart-matched-tokens"]) > 0) is expect_match
        assert not stub.seen[0].internal
        assert stub.seen[0].body.startswith(b'{"model"')
        assert stub.seen[1].cached_tokens == int(answer.headers["x-headstart-matched-tokens"])


async def test_a_fleet_of_equal_requests_does_not_all_land_on_one_worker() -> None:
    """A hot prefix spreads, since waiting costs more than computing it once more."""
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    async with running(*stubs), running_gateway(*(stub.url for stub in stubs)) as gateway:
        await gateway.until_exact(num_workers=2)
        for stub in stubs:
            stub.next_behaviours.extend([pause(0.2)] * 24)
        answers = await asyncio.gather(*(gateway.chat(LONG_TEXT, stream=True) for _ in range(24)))
        assert all(b"[DONE]" in answer.body for answer in answers)
        assert min(len(stub.seen) for stub in stubs) >= 4


async def test_raw_completions_and_several_prompts_are_routed_by_the_first() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        ids = [index % 256 for index in range(100)]
        for prompt in (LONG_TEXT, [LONG_TEXT, "another"], ids, [ids, [1, 2, 3]]):
            answer = await gateway.send("POST", "/v1/completions", payload={"model": "stub", "prompt": prompt})
            assert answer.status == 200
        assert stub.seen[1].prompt == stub.seen[0].prompt
        assert stub.seen[3].prompt == stub.seen[2].prompt == ids
        assert answer.headers["x-headstart-matched-tokens"] == "96"


async def test_when_nobody_can_take_a_request_the_answer_says_why() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        row = await gateway.worker()
        await gateway.send("POST", f"/admin/workers/{row['id']}/drain", headers={"Authorization": "Bearer admin"})
        await gateway.until(lambda: _says(gateway, "draining"), "the drain is named")
        assert (await gateway.send("GET", "/readyz")).status == 503
        stub.kv_problem = 503
        await gateway.until(lambda: _says(gateway, "ready"), "the worker's state is named")
        assert await gateway.metric('headstart_rejected_total{reason="no_worker"}') >= 2


async def _says(gateway: GatewayUnderTest, words: str) -> bool:
    answer = await gateway.chat()
    return words in answer.error.get("message", "")
