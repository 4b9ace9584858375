"""The threads of a compiled step outlive a part that fails."""

from __future__ import annotations

import threading

import pytest

from worker.model.compiled.team import ThreadTeam

WAIT_S = 60


def test_after_a_part_that_fails_on_every_thread_the_next_one_runs_on_all() -> None:
    team = ThreadTeam(3)
    failing, working = threading.Barrier(3), threading.Barrier(3)

    def fail(thread: int) -> None:
        failing.wait(WAIT_S)
        raise ValueError(thread)

    with pytest.raises(ValueError, match="0"):
        team.run(fail)
    seen: set[int] = set()

    def work(thread: int) -> None:
        seen.add(thread)
        working.wait(WAIT_S)

    team.run(work)
    assert seen == {0, 1, 2}
