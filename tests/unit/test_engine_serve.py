"""The engine process's loop, run in this process: what it sends, and with which status it ends."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.tiny_engine import GREEDY, write_tiny_llama
from worker.core.batch import StepPlan
from worker.engine.engine import FAILED_STEPS_MAX, Engine
from worker.engine.engine_config import EngineConfig
from worker.engine.engine_process import EXIT_FAILED, EXIT_OK, CommandInbox, FinishWork, serve
from worker.engine.messages import (
    AbortRequest,
    Command,
    EngineFailed,
    Report,
    SequenceOutput,
    Shutdown,
    StepReport,
    SubmitSequence,
)
from worker.engine.model_runner import RunOutcome
from worker.model.sampler import SamplerRow
from worker.prompt.grammar_spec import ANY_OBJECT, GrammarKind, GrammarSpec

WAIT_S = 60.0
OPEN_PIPES: list[Connection] = []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    engine = Engine(EngineConfig(model=str(checkpoint), kv_memory="2MiB", device="cpu"), clock=time.monotonic)
    engine.load()
    return engine


@pytest.fixture
def inbox() -> CommandInbox:
    return CommandInbox(Pipe()[0])      # never started: the tests put the commands in themselves


def submit(request_id: str, max_new_tokens: int) -> SubmitSequence:
    return SubmitSequence(request_id, 0, [5, 6, 7, 8], GREEDY, max_new_tokens, frozenset())


def outputs(reports: list[Report]) -> list[SequenceOutput]:
    return [output for report in reports if isinstance(report, StepReport) for output in report.outputs]


class DeadRunner:
    """A runner whose device is gone."""

    def run(self, plan: StepPlan, rows: Mapping[int, SamplerRow]) -> RunOutcome:
        raise RuntimeError("device lost")


def test_shutdown_aborts_what_runs(engine: Engine, inbox: CommandInbox) -> None:
    reports: list[Report] = []
    inbox.put(submit("long", 500))

    def send(report: Report) -> None:
        reports.append(report)
        if len(reports) == 3:
            inbox.put(Shutdown())

    assert serve(engine, inbox, send) == EXIT_OK
    assert [output.finish_reason for output in outputs(reports)] == [None, None, None, "abort"]
    assert engine.idle


def test_finish_work_waits_for_the_work_at_hand(engine: Engine, inbox: CommandInbox) -> None:
    reports: list[Report] = []
    for command in (submit("last", 6), FinishWork(), submit("just in time", 2)):
        inbox.put(command)
    assert serve(engine, inbox, reports.append) == EXIT_OK
    assert {output.request_id: output.finish_reason for output in outputs(reports)} == {
        "last": "length", "just in time": "length"}


def test_finish_work_while_idle_ends_at_once(engine: Engine, inbox: CommandInbox) -> None:
    inbox.put(FinishWork())
    assert serve(engine, inbox, lambda report: None) == EXIT_OK


def test_an_abort_is_honoured_before_the_next_step(engine: Engine, inbox: CommandInbox) -> None:
    reports: list[Report] = []
    for command in (submit("gone", 500), AbortRequest("gone"), FinishWork()):
        inbox.put(command)
    assert serve(engine, inbox, reports.append) == EXIT_OK
    assert [(output.token_ids, output.finish_reason) for output in outputs(reports)] == [([], "abort")]
    assert all(isinstance(report, StepReport) and report.batch_size == 0 for report in reports)


def test_a_grammar_holds_up_nothing_but_its_own_request() -> None:
    shell, engine_end = Pipe()
    inbox, compiled = CommandInbox(engine_end), threading.Event()

    def prepare(command: Command) -> None:
        assert compiled.wait(WAIT_S)

    inbox.prepare = prepare
    inbox.start()
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "response_format")
    slow, quick = dataclasses.replace(submit("slow", 1), grammar=grammar), submit("quick", 1)
    for command in (slow, AbortRequest("slow"), quick, AbortRequest("quick")):
        shell.send(command)
    first = [next(inbox.drain(wait=True)), next(inbox.drain(wait=True))]
    assert first == [quick, AbortRequest("quick")]
    assert list(inbox.drain(wait=False)) == []
    compiled.set()
    assert [next(inbox.drain(wait=True)), next(inbox.drain(wait=True))] == [slow, AbortRequest("slow")]
    shell.send(AbortRequest("slow"))
    assert next(inbox.drain(wait=True)) == AbortRequest("slow")
    # `shell` stays open: its end would be the end of this process.
    OPEN_PIPES.append(shell)


def test_a_broken_engine_says_so_and_fails(engine: Engine, inbox: CommandInbox) -> None:
    engine.runner = DeadRunner()
    reports: list[Report] = []

    def send(report: Report) -> None:
        reports.append(report)
        inbox.put(submit(f"r{len(reports)}", 4))

    inbox.put(submit("r0", 4))
    assert serve(engine, inbox, send) == EXIT_FAILED
    assert [output.finish_reason for output in outputs(reports)] == ["error"] * FAILED_STEPS_MAX
    assert isinstance(reports[-1], EngineFailed)
    assert "device lost" in reports[-1].message
    assert not reports[-1].users_fault
