"""The threads of a compiled step outlive a part that fails, and do not look for long for one that gets no core."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from worker.model.compiled.team import (
    FEW_ROWS,
    IN_VAIN,
    IN_VAIN_MAX,
    MANY_ROWS,
    SLEEPERS,
    ThreadTeam,
)
from worker.model.compiled.team_size import FIRST_TURN

WAIT_S = 60


def test_after_a_part_that_fails_on_every_thread_the_next_one_runs_on_all() -> None:
    team = ThreadTeam(3)
    failing, working = threading.Barrier(3), threading.Barrier(3)

    def fail(thread: int) -> None:
        failing.wait(WAIT_S)
        raise ValueError(thread)

    with pytest.raises(ValueError, match="0"):
        team.run(fail, MANY_ROWS)
    seen: set[int] = set()

    def work(thread: int) -> None:
        seen.add(thread)
        working.wait(WAIT_S)

    team.run(work, MANY_ROWS)
    assert seen == {0, 1, 2}


def test_steps_in_vain_are_followed_by_steps_of_half_the_threads() -> None:
    team = ThreadTeam(3)

    def sizes(count: int, kind: int) -> list[int]:
        """Of so many steps, whose threads all look in vain."""
        found = []
        for _ in range(count):
            size, _, signals = team.for_step(kind)
            found.append(size)
            met = threading.Barrier(size)

            def part(thread: int, signals: np.ndarray = signals, met: threading.Barrier = met) -> None:
                signals[IN_VAIN] = IN_VAIN_MAX * 2
                met.wait(WAIT_S)

            team.run(part, kind)
        return found

    assert sizes(2, MANY_ROWS) == [3, 3]
    assert sizes(2 + FIRST_TURN, FEW_ROWS) == [3] + [1] * FIRST_TURN + [3]
    assert sizes(2, MANY_ROWS) == [3, 3]


def test_who_looks_for_long_sleeps_until_the_other_comes() -> None:
    pytest.importorskip("numba")
    from worker.model.compiled.machine import compiled
    from worker.model.compiled.step import Team, wait_for_all

    @compiled
    def meet(team: Team) -> None:
        wait_for_all(team)

    team = Team(2, 100, ThreadTeam(2).for_step(FEW_ROWS)[2])
    meet(team._replace(size=1))
    for vain in range(1, IN_VAIN_MAX + 2):
        first = threading.Thread(target=meet, args=(team,), daemon=True)
        first.start()
        until = time.monotonic() + WAIT_S
        while team.signals[SLEEPERS] == 0 and time.monotonic() < until:
            time.sleep(0.001)
        meet(team)
        first.join(WAIT_S)
        assert not first.is_alive()
        assert team.signals[IN_VAIN] == min(vain, IN_VAIN_MAX)

