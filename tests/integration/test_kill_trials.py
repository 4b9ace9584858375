"""Workers killed (-9) in mid-stream: the small version of `make kill-trials`."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.kill_trials import Plan, run_trials
from loadtests.watched_stream import comparable, flaw_of
from tests.support.tiny_worker import write_tiny_model


async def test_killed_workers_and_clients_that_notice_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    report = await run_trials(Plan(str(model), "tiny", num_trials=3, num_streams=16, num_workers=2, num_sets=1,
                                   max_tokens=300, between_min=4, seed=3, worker_arguments=("--kv-memory", "8MiB")))
    assert report["clean"] == report["trials"] == 3, report
    assert report["client_visible_errors"] == report["different_streams"] == 0
    assert all(trial["migrations"] >= 4 for trial in report["by_trial"])


GOOD = (b'data: {"id":"a","created":1,"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"id":"a","created":1,"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize(("answer", "flaw"), [
    (GOOD, None),
    (GOOD[:-5], "no [DONE]"),
    (GOOD.replace(b"data: [DONE]", b"event: error\ndata: {}"), "an error event"),
    (GOOD.replace(b'"id":"a","created":1,"choices":[{"delta":{"content"', b'"id":"b","choices":[{"delta":{"content"'),
     "more than one id"),
    (GOOD.replace(b"data: [DONE]", GOOD[:GOOD.index(b"\n\n")] + b"\n\ndata: [DONE]"), "not exactly one chunk"),
])
def test_the_eye_of_the_harness_sees_flaws(answer: bytes, flaw: str | None) -> None:
    found = flaw_of(answer)
    assert found is None if flaw is None else found is not None and flaw in found


def test_only_time_cache_and_comments_may_differ() -> None:
    other = GOOD.replace(b'"created":1', b'"created":2').replace(b"data: [DONE]", b": keep-alive\n\ndata: [DONE]")
    assert comparable(other) == comparable(GOOD)
    assert comparable(GOOD.replace(b'"x"', b'"y"')) != comparable(GOOD)
    assert comparable(GOOD.replace(b'"x"', b'": keep-alive"')) != comparable(GOOD)
