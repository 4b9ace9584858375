"""`--processes 4`: limits over all, a drain in all, hits in all, a kill without residue, a reload without a break."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from gateway.listening import ListenError, open_listeners
from tests.integration.test_gateway_tenants import keys_file
from tests.integration.test_up_command import alive
from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN
from tests.support.gateway_processes import ProcessGroup, chat_body, running_group
from tests.support.stub_worker import Behaviour, Seen, StubWorker, answer, events_of, open_stream, running

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
PROCESSES, LIMIT = 4, 10
FREE, LIMITED, METERED = (f"hs-a-key-for-tenant-{name}-27182818" for name in ("free", "limited", "metered"))


class Gate:
    """Holds requests at a stub until it is opened: whole answers before their first byte, streams behind it."""

    def __init__(self, stub: StubWorker) -> None:
        self.opened = asyncio.Event()
        self.num_inside = self.most_inside = 0
        stub.next_behaviours.clear()
        stub.next_behaviours.extend([self.behaviour()] * 500)

    def behaviour(self) -> Behaviour:
        async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            try:
                if not seen.stream:
                    await self.opened.wait()
                    return await answer(stub, request, seen)
                response, events = await open_stream(request, {}), events_of(seen)
                await response.write(events[0])
                await self.opened.wait()
                for event in events[1:]:
                    await response.write(event)
                await response.write_eof()
                return response
            finally:
                self.num_inside -= 1

        return behave


class House:
    """The group and its two stubs."""

    def __init__(self, group: ProcessGroup, stubs: list[StubWorker]) -> None:
        self.group, self.stubs = group, stubs
        self._gates: list[Gate] = []

    def gates(self) -> list[Gate]:
        self._gates = [Gate(stub) for stub in self.stubs]
        return self._gates

    def open_gates(self) -> None:
        """So that a test that failed holds no request that the next one would count."""
        for gate in self._gates:
            gate.opened.set()

    async def until_exact(self) -> None:
        """Whichever process answers (32 connections miss one of four once in ten thousand times) knows this life of
        both stubs; one that has not noticed a restart yet is exact and ready too, about the life before."""
        wanted = {(stub.epoch, "exact", "ready") for stub in self.stubs}

        async def exact() -> bool:
            rows = [row for _ in range(8 * PROCESSES) for row in await self.group.workers()]
            return {(row["epoch"], row["knowledge"], row["state"]) for row in rows} == wanted

        await self.group.until(exact, "every process knows both workers exactly")

    async def explain(self, text: str) -> dict[str, Any]:
        """The decision that some process would take now."""
        found = await self.group.send("POST", "/admin/explain?tenant=free", headers=ADMIN,
                                      payload=chat_body(text, stream=False))
        return dict(json.loads(found.body)["decision"])

    async def until_inside(self, gates: list[Gate], count: int) -> None:
        async def inside() -> bool:
            return sum(gate.num_inside for gate in gates) == count

        await self.group.until(inside, f"{count} requests at the workers")

    async def until_idle(self) -> None:
        async def idle() -> bool:
            series = await self.group.metrics()
            return not any(value for name, value in series.items()
                           if name.startswith(("headstart_inflight", "headstart_queue_depth")))

        await self.group.until(idle, "nothing under way")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("processes")
    keys = keys_file(folder, {"id": "free", "key": FREE}, {"id": "limited", "key": LIMITED, "max_concurrent": LIMIT},
                     {"id": "metered", "key": METERED, "requests_per_minute": LIMIT})
    stubs = [StubWorker(worker_token=WORKER_TOKEN) for _ in range(2)]
    arguments = [f"--max-inflight-per-worker={LIMIT}", "--reserved-places-ratio=0", f"--keys-file={keys}"]
    async with running(*stubs), running_group(*(stub.url for stub in stubs), processes=PROCESSES,
                                              log=folder / "log", arguments=arguments) as group:
        yield House(group, stubs)


@pytest.fixture
def fresh(house: House) -> Iterator[House]:
    """Answers at once again, and nothing seen yet."""
    for stub in house.stubs:
        stub.next_behaviours.clear()
        stub.seen.clear()
    yield house
    house.open_gates()


async def test_each_worker_gets_its_limit_and_the_rest_waits(fresh: House) -> None:
    await fresh.until_exact()
    gates = fresh.gates()
    sent = [asyncio.create_task(fresh.group.chat(f"{number} asks", key=FREE)) for number in range(60)]
    await fresh.until_inside(gates, 2 * LIMIT)

    async def rest_waits() -> bool:
        return await fresh.group.metric("headstart_queue_depth") == 60 - 2 * LIMIT

    await fresh.group.until(rest_waits, "all others wait")
    assert [gate.num_inside for gate in gates] == [LIMIT, LIMIT]
    rows = await fresh.group.workers()
    assert [row["inflight"] for row in rows] == [LIMIT, LIMIT], "any process answers for all"
    for gate in gates:
        gate.opened.set()
    answers = await asyncio.gather(*sent)
    assert [one.status for one in answers] == [200] * 60
    assert [gate.most_inside for gate in gates] == [LIMIT, LIMIT]
    assert set(await fresh.group.process_of(*answers)) == set(range(PROCESSES))
    await fresh.until_idle()


async def test_a_tenants_limit_of_ten_admits_ten(fresh: House) -> None:
    gates = fresh.gates()
    sent = [asyncio.create_task(fresh.group.chat(f"{number} asks", key=LIMITED)) for number in range(40)]

    async def decided() -> bool:
        return sum(task.done() for task in sent) == 40 - LIMIT

    await fresh.group.until(decided, "all but ten were refused")
    refused = [task.result() for task in sent if task.done()]
    assert {(one.status, one.error["code"]) for one in refused} == {(429, "rate_limited")}
    await fresh.until_inside(gates, LIMIT)
    for gate in gates:
        gate.opened.set()
    assert sorted(one.status for one in await asyncio.gather(*sent)) == [200] * LIMIT + [429] * (40 - LIMIT)
    assert (await fresh.group.chat("again", key=LIMITED)).status == 200


async def test_ten_requests_a_minute_are_ten_in_all(fresh: House) -> None:
    began_at = time.monotonic()
    answers = await asyncio.gather(*(fresh.group.chat(f"{number} asks", key=METERED) for number in range(40)))
    refilled = (time.monotonic() - began_at) * LIMIT / 60
    assert LIMIT <= sum(one.status == 200 for one in answers) <= LIMIT + refilled
    assert len(set(await fresh.group.process_of(*answers))) == PROCESSES


async def test_a_second_turn_on_another_process_hits(fresh: House) -> None:
    first_turn = "a long story that goes on for more than a few blocks of sixteen bytes each " * 4
    first = await fresh.group.chat(first_turn, key=FREE)

    async def known() -> bool:
        found = [await fresh.explain(first_turn + "and then") for _ in range(4 * PROCESSES)]
        return all(decision["matched_tokens"] >= len(first_turn) // 16 * 16 for decision in found)

    await fresh.group.until(known, "every process has heard of the first turn")
    second = [await fresh.group.chat(first_turn + f"and then {number}", key=FREE) for number in range(12)]
    assert len(set(await fresh.group.process_of(*second))) > 1
    assert {one.headers["x-headstart-worker"] for one in second} == {first.headers["x-headstart-worker"]}
    assert all(int(one.headers["x-headstart-matched-tokens"]) >= len(first_turn) // 16 * 16 for one in second)
    await fresh.until_idle()


async def test_siblings_of_a_prompt_that_is_still_computed_go_together(fresh: House) -> None:
    """No event can have told: the bet of the process that sent the first has reached the others."""
    text = "one hot prompt that nobody has seen before, of several blocks, asked by many at once " * 12
    gates = fresh.gates()
    first = asyncio.create_task(fresh.group.chat(text, key=FREE))
    await fresh.until_inside(gates, 1)

    async def bet_on() -> bool:
        found = [await fresh.explain(text) for _ in range(4 * PROCESSES)]
        return all(decision["match_speculative_tokens"] > 900 for decision in found)

    await fresh.group.until(bet_on, "every process bets on the worker that computes it")
    for gate in gates:
        gate.opened.set()
    assert (await first).status == 200
    await fresh.until_idle()


async def test_a_drain_holds_in_all_processes_and_in_one_that_starts_later(fresh: House) -> None:
    drained, other = fresh.stubs
    worker = drained.url.removeprefix("http://")
    assert (await fresh.group.send("POST", f"/admin/workers/{worker}/drain", headers=ADMIN)).status == 202
    answers = [await fresh.group.chat(f"{number} asks", key=FREE) for number in range(24)]
    assert [len(drained.seen), len(other.seen)] == [0, 24]
    assert len(set(await fresh.group.process_of(*answers))) > 1
    os.kill(fresh.group.pids()[0], signal.SIGKILL)
    await fresh.group.until_logged("process_ended")
    await fresh.group.until_serving(PROCESSES)
    answers = [await fresh.group.chat(f"{number} asks again", key=FREE) for number in range(24)]
    assert not drained.seen
    assert len(set(await fresh.group.process_of(*answers))) > 1
    assert (await fresh.group.send("POST", f"/admin/workers/{worker}/undrain", headers=ADMIN)).status == 200
    await fresh.group.send("POST", f"/admin/workers/{other.url.removeprefix('http://')}/drain", headers=ADMIN)
    answers = [await fresh.group.chat(f"{number} asks the other", key=FREE) for number in range(24)]
    assert [len(drained.seen), len(other.seen)] == [24, 48], "each process sends there again, and none to the other"
    assert len(set(await fresh.group.process_of(*answers))) > 1
    for stub in (drained, other):
        await stub.stop()
        await stub.start()
    await fresh.until_exact()


async def _stream(group: ProcessGroup, number: int, session: aiohttp.ClientSession | None = None) -> list[bytes]:
    """One stream's lines; ClientError when it breaks."""
    payload, headers = chat_body(f"{number} streams", stream=True), {"Authorization": f"Bearer {LIMITED}"}
    async with (session or group.session).post(f"{group.url}/v1/chat/completions", json=payload,
                                               headers=headers) as response:
        assert response.status == 200
        return [line async for line in response.content]


async def _stream_twice(group: ProcessGroup, number: int) -> list[bytes]:
    """Two streams' lines, on one connection as long as it is kept; a POST is not sent again when it breaks."""
    async with aiohttp.ClientSession() as session:
        return [line for turn in (number, 100 + number) for line in await _stream(group, turn, session)]


async def test_killing_one_breaks_its_connections_alone_and_leaves_nothing_counted(fresh: House) -> None:
    gates, before = fresh.gates(), await fresh.group.metrics()
    streams = [asyncio.create_task(_stream(fresh.group, number)) for number in range(LIMIT)]
    await fresh.until_inside(gates, LIMIT)
    assert (await fresh.group.chat("one too many", key=LIMITED)).status == 429

    num_broken = 0
    for victim in fresh.group.pids():  # the kernel may have given the first one no stream: 1 of 18 times
        os.kill(victim, signal.SIGKILL)
        await fresh.group.until_logged("process_ended", 1 + len(fresh.group.lines("process_ended")))
        await fresh.group.until_serving(PROCESSES)
        assert victim not in fresh.group.pids()
        if (num_broken := sum(stream.done() for stream in streams)):
            break
    assert num_broken > 0, "nobody's stream broke, whoever was killed"
    await fresh.until_inside(gates, LIMIT - num_broken)
    assert sum(row["inflight"] for row in await fresh.group.workers()) == LIMIT - num_broken
    again = [asyncio.create_task(fresh.group.chat(f"{number} asks", key=LIMITED)) for number in range(20)]

    async def decided() -> bool:
        return sum(task.done() for task in again) == 20 - num_broken

    await fresh.group.until(decided, "exactly what was freed is admitted again")
    for gate in gates:
        gate.opened.set()
    ends = await asyncio.gather(*streams, return_exceptions=True)
    assert sum(isinstance(end, aiohttp.ClientError) for end in ends) == num_broken < LIMIT
    assert all(b"data: [DONE]\n" in end for end in ends if isinstance(end, list))
    statuses = sorted(one.status for one in await asyncio.gather(*again))
    assert statuses == [200] * num_broken + [429] * (20 - num_broken)
    await fresh.until_idle()
    after = await fresh.group.metrics()
    assert all(after.get(name, 0) >= value for name, value in before.items() if name.endswith(("_total", "_count")))


async def test_a_reload_breaks_no_stream_and_refuses_nobody(fresh: House) -> None:
    gates, before = fresh.gates(), set(fresh.group.pids())
    streams = [asyncio.create_task(_stream_twice(fresh.group, number)) for number in range(8)]
    await fresh.until_inside(gates, 8)
    for stub in fresh.stubs:
        stub.next_behaviours.clear()
    statuses: list[int] = []
    done = asyncio.Event()

    async def keep_asking() -> None:
        """On kept connections, as clients do."""
        async with aiohttp.ClientSession() as session:
            while not done.is_set():
                async with session.get(f"{fresh.group.url}/v1/models",
                                       headers={"Authorization": f"Bearer {FREE}"}) as response:
                    statuses.append(response.status)
                await asyncio.sleep(0.01)

    asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
    fresh.group.supervisor.send_signal(signal.SIGHUP)
    await fresh.group.until_logged("reload_finished")
    assert await fresh.group.metric("headstart_processes") > PROCESSES, "those with streams finish them"
    for gate in gates:
        gate.opened.set()
    assert all(lines.count(b"data: [DONE]\n") == 2 for lines in await asyncio.gather(*streams))
    await fresh.group.until_serving(PROCESSES)
    done.set()
    await asyncio.gather(*asking)
    assert set(statuses) == {200}

    async def only_new() -> bool:
        return not before & set(fresh.group.pids())

    await fresh.group.until(only_new, "every process was replaced")
    await fresh.until_idle()


def _mistake(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "gateway.cli", "gateway", "--processes=2", *arguments], text=True,
                          capture_output=True, timeout=60, env={**os.environ, "HEADSTART_ADMIN_TOKEN": "admin",
                                                                "HEADSTART_SALT_SECRET": "salt"})
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


async def test_mistakes_end_the_start_with_one_line(tmp_path: Path) -> None:
    text = await asyncio.to_thread(_mistake, "--port=0", f"--keys-file={tmp_path}/none.toml")
    said = [line for line in text.splitlines() if line.startswith("headstart")]
    assert said == [f"headstart gateway: {tmp_path}/none.toml: cannot be read: No such file or directory"]
    with socket.socket() as taken:  # also where its owner would share it: two gateways would halve the clients
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert await asyncio.to_thread(_mistake, f"--port={port}") == (
            f"headstart gateway: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --host "
            "or --port, or stop what uses it\n")


async def test_a_killed_supervisor_leaves_the_port_to_the_next_while_streams_finish(tmp_path: Path) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub):
        gate = Gate(stub)
        async with running_group(stub.url, processes=2, log=tmp_path / "log") as group:
            members = group.pids()
            streams = [asyncio.create_task(_stream(group, number)) for number in range(2)]
            for _ in range(3000):
                if gate.num_inside == 2:
                    break
                await asyncio.sleep(0.01)
            group.supervisor.kill()
            await asyncio.to_thread(group.supervisor.wait, 30)
            port = int(group.url.rpartition(":")[2])
            for _ in range(3000):
                try:
                    open_listeners("127.0.0.1", port)[0][0].close()
                    break
                except ListenError:
                    await asyncio.sleep(0.01)
            else:
                raise AssertionError("the port was never free")
            assert not any(stream.done() for stream in streams), "they still run"
            gate.opened.set()
            assert all(b"data: [DONE]\n" in lines for lines in await asyncio.gather(*streams))
        for _ in range(3000):
            if not any(map(alive, members)):
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("a process outlived its supervisor and its work")


async def test_sigterm_finishes_the_streams_and_exits_0(tmp_path: Path) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_group(stub.url, processes=2, log=tmp_path / "log") as group:
        gate = Gate(stub)
        streams = [asyncio.create_task(_stream(group, number)) for number in range(4)]

        async def inside() -> bool:
            return gate.num_inside == 4

        await group.until(inside, "four streams")
        group.supervisor.send_signal(signal.SIGTERM)
        await group.until_logged("gateway_draining", 2)
        gate.opened.set()
        assert all(b"data: [DONE]\n" in lines for lines in await asyncio.gather(*streams))
        assert await asyncio.to_thread(group.supervisor.wait, 30) == 0
