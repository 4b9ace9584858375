"""The threads of a compiled step outlive a part that fails, and do not look for long for one that gets no core."""

from __future__ import annotations

import threading
import time

import pytest

from worker.model.compiled.team import (
    FEW_ROWS,
    IN_VAIN,
    IN_VAIN_MAX,
    MANY_ROWS,
    SLEEPERS,
    STEPS_BY_HALF,
    STEPS_BY_HALF_MAX,
    ThreadTeam,
)

WAIT_S = 60


def test_after_a_part_that_fails_on_every_thread_the_next_one_runs_on_all() -> None:
    team = ThreadTeam(3)
    failing, working = threading.Barrier(3), threading.Barrier(3)

    def fail(thread: int) -> None:
        failing.wait(WAIT_S)
        raise ValueError(thread)

    with pytest.raises(ValueError, match="0"):
        team.run(fail, 3)
    seen: set[int] = set()

    def work(thread: int) -> None:
        seen.add(thread)
        working.wait(WAIT_S)

    team.run(work, 3)
    assert seen == {0, 1, 2}
    seen.clear()
    team.run(seen.add, 1)
    assert seen == {0}


@pytest.mark.parametrize("size", [2, 5])
def test_after_a_step_that_looked_in_vain_half_as_many_do_the_next_ones(size: int) -> None:
    team, limit = ThreadTeam(size), IN_VAIN_MAX * (size - 1)

    def next_size(kind: int, in_vain: int) -> int:
        """Of a step after which this was counted."""
        of_step, _, signals = team.for_step(kind)
        signals[IN_VAIN] = in_vain
        return of_step

    turns = [STEPS_BY_HALF * 2**turn for turn in range(12)]
    assert next_size(FEW_ROWS, limit) == size
    for turn in turns:
        by_half = min(turn, STEPS_BY_HALF_MAX)
        assert [next_size(FEW_ROWS, 0) for _ in range(by_half)] == [size // 2] * by_half
        assert next_size(MANY_ROWS, limit) == size
        assert next_size(FEW_ROWS, limit) == size, "then all are tried again"
    assert [next_size(FEW_ROWS, 0) for _ in range(STEPS_BY_HALF_MAX)] == [size // 2] * STEPS_BY_HALF_MAX
    assert [next_size(FEW_ROWS, limit - 1) for _ in range(3)] == [size] * 3
    assert next_size(FEW_ROWS, limit) == size
    assert [next_size(FEW_ROWS, 0) for _ in range(STEPS_BY_HALF + 1)] == [size // 2] * STEPS_BY_HALF + [size]


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

