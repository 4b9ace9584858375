"""The engine in its own process, over its real pipe: life, death, signals, limits.

A process takes seconds to import torch: tests that leave their engine healthy share one (`shared`, one event loop).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.tiny_engine import GREEDY, write_tiny_llama
from worker.engine.engine_client import EngineClient, EngineState
from worker.engine.engine_config import EngineConfig
from worker.engine.messages import (
    EngineFailed,
    EngineReady,
    Report,
    SequenceOutput,
    StepReport,
    SubmitSequence,
)
from worker.protocol.api_error import ApiError
from worker.protocol.cache_events import AllBlocksCleared, BlockStored, CacheEvent

WAIT_S = 60.0


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


class Listener:
    """What the shell would do with reports: keep them, and wake whoever waits for something in them."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, report: Report) -> None:
        self.reports.append(report)
        task = asyncio.get_running_loop().create_task(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    @property
    def outputs(self) -> list[SequenceOutput]:
        return [output for report in self.reports if isinstance(report, StepReport) for output in report.outputs]

    @property
    def events(self) -> list[CacheEvent]:
        return [event for report in self.reports if isinstance(report, StepReport) for event in report.events]

    @property
    def cleared(self) -> bool:
        return any(isinstance(event, AllBlocksCleared) for event in self.events)

    def finish_reasons(self) -> dict[str, str]:
        return {output.request_id: output.finish_reason for output in self.outputs if output.finish_reason}

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]


def prompt(request_id: str, token_ids: list[int], max_new_tokens: int) -> SubmitSequence:
    return SubmitSequence(request_id, 0, token_ids, GREEDY, max_new_tokens, frozenset())


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_llama), kv_memory="4MiB", threads=1, max_running=4, max_waiting=2)


@dataclass
class Stage:
    """An engine client that is ready, and what it has reported since the test began."""

    client: EngineClient
    listener: Listener


@asynccontextmanager
async def stage_of(config: EngineConfig) -> AsyncIterator[Stage]:
    client, listener = EngineClient(), Listener()
    await client.start(config, listener)
    assert isinstance(await client.wait_ready(), EngineReady)
    yield Stage(client, listener)
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def healthy(config: EngineConfig) -> AsyncIterator[Stage]:
    async with stage_of(config) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def shared(healthy: Stage) -> AsyncIterator[Stage]:
    """The shared engine, idle and with an empty cache."""
    healthy.client.reset()
    await healthy.listener.until(lambda: healthy.listener.cleared)
    healthy.listener.reports.clear()
    yield healthy
    assert healthy.client.state is EngineState.READY
    assert healthy.client.num_open == 0


@pytest_asyncio.fixture(loop_scope="module")
async def listener() -> Listener:
    return Listener()


def test_the_shell_side_imports_no_torch() -> None:
    code = ("import sys; import worker.engine.engine_client, worker.engine.messages; "
            "heavy = ('torch', 'transformers', 'worker.core.scheduler', 'worker.model'); "
            "print([name for name in heavy if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@in_one_loop
async def test_a_prompt_is_answered_and_the_second_one_hits(shared: Stage) -> None:
    client, listener = shared.client, shared.listener
    client.submit(prompt("cold", list(range(40)), 8))
    await listener.until(lambda: "cold" in listener.finish_reasons())
    client.submit(prompt("warm", list(range(40)), 8))
    await listener.until(lambda: "warm" in listener.finish_reasons())
    assert listener.tokens_of("cold") == listener.tokens_of("warm")
    assert [output.cached_tokens for output in listener.outputs if output.cached_tokens is not None] == [0, 32]
    assert listener.finish_reasons() == {"cold": "length", "warm": "length"}
    assert any(isinstance(event, BlockStored) for event in listener.events)
    assert client.num_open == 0
    assert client.stats.num_running == 0


@in_one_loop
async def test_one_report_per_step_carries_the_whole_batch(shared: Stage) -> None:
    client, listener = shared.client, shared.listener
    steps_before = client.stats.steps_total
    for index in range(4):
        client.submit(prompt(f"r{index}", [index + 1] * 20, 10))
    await listener.until(lambda: len(listener.finish_reasons()) == 4)
    steps = [report for report in listener.reports if isinstance(report, StepReport) and report.batch_size]
    assert len(steps) == client.stats.steps_total - steps_before
    assert max(len(report.outputs) for report in steps) > 1


@in_one_loop
async def test_an_abort_ends_a_long_answer(shared: Stage) -> None:
    client, listener = shared.client, shared.listener
    client.submit(prompt("long", list(range(30)), 400))
    await listener.until(lambda: len(listener.tokens_of("long")) > 2)
    client.abort("long")
    client.abort("long")
    client.abort("never heard of")
    await listener.until(lambda: "long" in listener.finish_reasons())
    assert listener.finish_reasons()["long"] == "abort"
    assert len(listener.tokens_of("long")) < 400
    assert client.stats.blocks_used == 0
    assert client.num_open == 0


@in_one_loop
async def test_more_than_it_may_hold_is_refused_whole(shared: Stage) -> None:
    client, listener = shared.client, shared.listener
    for index in range(6):
        client.submit(prompt(f"r{index}", list(range(20)), 400))
    with pytest.raises(ApiError) as refused:
        client.submit(prompt("one too many", [1, 2, 3], 1))
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert "Retry-After" in refused.value.headers
    client.abort("r0")
    await listener.until(lambda: "r0" in listener.finish_reasons())
    with pytest.raises(ApiError):
        client.submit(prompt("two", [1, 2, 3], 1), replace(prompt("two", [1, 2, 3], 1), choice=1))
    assert client.num_open == 5
    for index in range(1, 6):
        client.abort(f"r{index}")
    await listener.until(lambda: client.num_open == 0)


@in_one_loop
async def test_a_killed_engine_is_reported(config: EngineConfig) -> None:
    async with stage_of(config) as stage:
        client, listener = stage.client, stage.listener
        client.submit(prompt("cut off", list(range(30)), 400))
        await listener.until(lambda: bool(listener.tokens_of("cut off")))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await listener.until(lambda: isinstance(listener.reports[-1], EngineFailed))
        failure = listener.reports[-1]
        assert isinstance(failure, EngineFailed)
        assert "signal 9" in failure.message
        assert not failure.users_fault
        assert client.state is EngineState.FAILED
        assert not client.alive
        with pytest.raises(ApiError) as refused:
            client.submit(prompt("late", [1], 1))
        assert refused.value.status == 503


@in_one_loop
async def test_sigterm_finishes_the_work_at_hand(config: EngineConfig) -> None:
    async with stage_of(config) as stage:
        client, listener = stage.client, stage.listener
        client.submit(prompt("last", list(range(30)), 40))
        await listener.until(lambda: bool(listener.tokens_of("last")))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        await listener.until(lambda: isinstance(listener.reports[-1], EngineFailed))
        assert listener.finish_reasons() == {"last": "length"}
        assert len(listener.tokens_of("last")) == 40
        assert client.failure is not None
        assert "status 0" in client.failure.message


@in_one_loop
async def test_close_ends_the_process(config: EngineConfig, listener: Listener) -> None:
    client = EngineClient()
    await client.start(config, listener)
    await client.wait_ready()
    pid = client.pid
    assert pid is not None
    client.submit(prompt("cut off", list(range(30)), 400))
    await client.close()
    await client.close()
    assert client.state is EngineState.CLOSED
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@in_one_loop
async def test_close_while_loading(config: EngineConfig, listener: Listener) -> None:
    client = EngineClient()
    await client.start(config, listener)
    with pytest.raises(ApiError) as refused:
        client.submit(prompt("early", [1], 1))
    assert (refused.value.status, refused.value.code) == (503, "worker_loading")
    await client.close(limit_s=0.1)
    assert isinstance(await client.wait_ready(), EngineFailed)
    assert listener.reports == []


@in_one_loop
async def test_closing_what_never_started() -> None:
    await EngineClient().close()


@in_one_loop
async def test_a_wrong_setting_is_the_users_fault(config: EngineConfig, listener: Listener, tmp_path: Path) -> None:
    client = EngineClient()
    await client.start(replace(config, model=str(tmp_path / "nowhere")), listener)
    outcome = await client.wait_ready()
    assert isinstance(outcome, EngineFailed)
    assert outcome.users_fault
    assert "nowhere" in outcome.message
    assert "\n" not in outcome.message
    assert client.state is EngineState.FAILED
    await client.close()


@in_one_loop
async def test_no_room_for_one_block_is_one_line(config: EngineConfig, listener: Listener) -> None:
    client = EngineClient()
    await client.start(replace(config, kv_memory="16B"), listener)
    outcome = await client.wait_ready()
    assert isinstance(outcome, EngineFailed)
    assert outcome.users_fault
    assert "kv_memory" in outcome.message
    await client.close()


def test_the_engine_dies_with_its_shell(config: EngineConfig, tmp_path: Path) -> None:
    """A shell killed outright leaves no engine behind, though the engine is in another process group."""
    script = tmp_path / "shell.py"
    script.write_text(
        "import asyncio, sys\n"
        "from worker.engine.engine_client import EngineClient\n"
        "from worker.engine.engine_config import EngineConfig\n"
        "async def main():\n"
        "    client = EngineClient()\n"
        "    await client.start(EngineConfig(model=sys.argv[1], kv_memory='4MiB', threads=1), lambda report: None)\n"
        "    await client.wait_ready()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n")
    with subprocess.Popen([sys.executable, str(script), config.model], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        engine_pid = int(shell.stdout.readline())
        engine = os.pidfd_open(engine_pid)
        shell.kill()
    try:
        assert _readable_within(engine, WAIT_S), "the engine outlived its shell"
    finally:
        os.close(engine)


def _readable_within(descriptor: int, limit_s: float) -> bool:
    """A pidfd becomes readable when its process ends."""
    import select

    return bool(select.select([descriptor], [], [], limit_s)[0])
