"""Signs of life: when an engine counts as silent, and beats that neither steps nor reports get in the way of."""

from __future__ import annotations

import queue
import threading
from multiprocessing import Pipe

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.engine_process import ReportPipe, start_beats
from worker.engine.heartbeat import BEAT_EVERY_S, LOOK_EVERY_S, SILENT_LOOKS, Heartbeat
from worker.engine.messages import EngineBeat, EngineFailed, Report

WAIT_S = 60.0
LARGE = 1_000_000        # far beyond what one write to a pipe takes
NUM_LARGE = 30


@given(st.lists(st.sampled_from(["heard", "look"])))
def test_silent_after_that_many_looks_in_a_row(history: list[str]) -> None:
    heartbeat = Heartbeat()
    for what in history:
        getattr(heartbeat, what)()
    since = history[::-1].index("heard") if "heard" in history else len(history)
    assert heartbeat.is_silent == (since >= SILENT_LOOKS)


def test_one_late_beat_is_no_silence() -> None:
    assert SILENT_LOOKS * LOOK_EVERY_S >= 3 * BEAT_EVERY_S


def test_beats_come_without_anybodys_doing() -> None:
    beats: queue.SimpleQueue[EngineBeat] = queue.SimpleQueue()
    start_beats(beats.put, every_s=0.001)
    for _ in range(3):
        assert beats.get(timeout=WAIT_S) == EngineBeat()


def test_beats_end_with_the_pipe() -> None:
    """Quietly: whoever reads stderr would take a traceback for the engine's own trouble."""
    failed: list[threading.ExceptHookArgs] = []
    refused = threading.Event()

    def send(beat: EngineBeat) -> None:
        refused.set()
        raise BrokenPipeError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        start_beats(send, every_s=0.001)
        assert refused.wait(WAIT_S)
        for thread in threading.enumerate():
            if thread.name == "heartbeat" and thread is not threading.current_thread():
                thread.join(0.1)        # those of other tests beat on
    assert not failed


def test_large_reports_and_beats_do_not_tear_each_other() -> None:
    ours, theirs = Pipe()
    pipe = ReportPipe(theirs)

    def report(letter: str) -> None:
        for _ in range(NUM_LARGE):
            pipe.send(EngineFailed(letter * LARGE, users_fault=False))

    senders = [threading.Thread(target=report, args=(letter,), daemon=True) for letter in "ab"]
    for sender in senders:
        sender.start()
    received: list[Report | EngineBeat] = []
    while len(received) < 2 * NUM_LARGE:
        assert ours.poll(WAIT_S), "a message was torn"
        received.append(ours.recv())
    texts = {message.message for message in received if isinstance(message, EngineFailed)}
    assert texts == {"a" * LARGE, "b" * LARGE}
