"""The threads of a compiled step outlive a part that fails, and do not look for long for one that gets no core."""

from __future__ import annotations

import threading
import time

import pytest

from worker.model.compiled.team import FEW_ROWS, IN_VAIN, IN_VAIN_MAX, MANY_ROWS, SLEEPERS, STEPS_ASLEEP, ThreadTeam

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


def test_after_a_step_that_looked_in_vain_the_next_ones_sleep_and_then_look_again() -> None:
    team = ThreadTeam(2)

    def looked_in_vain(kind: int) -> int:
        return int(team.for_step(kind)[2][IN_VAIN])

    for kind, kept in ((FEW_ROWS, STEPS_ASLEEP), (MANY_ROWS, 0)):
        for count in (IN_VAIN_MAX - 1, IN_VAIN_MAX):
            team.for_step(kind)[2][IN_VAIN] = count
            steps = [looked_in_vain(kind) for _ in range(STEPS_ASLEEP + 2)]
            asleep = kept if count == IN_VAIN_MAX else 0
            assert steps == [count] * asleep + [0] * (len(steps) - asleep)


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

