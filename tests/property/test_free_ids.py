"""Free ids against a plain set: whatever is taken was free, and nothing is lost."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.free_ids import FreeIds


@given(st.randoms(use_true_random=False), st.integers(1, 120))
def test_every_id_is_taken_once_until_it_comes_back(chance: random.Random, num_steps: int) -> None:
    ids = FreeIds()
    free: set[int] = set()
    taken: list[int] = []
    num_rows = 1
    for _ in range(num_steps):
        if taken and chance.random() < 0.4:
            for _ in range(chance.randrange(1, 8)):
                if taken:
                    block = taken.pop(chance.choice((-1, 0, chance.randrange(len(taken)))))
                    ids.give_back(block)
                    free.add(block)
        else:
            if ids.first == ids.end and not ids.next_run():
                assert not free, "there were free ids left"
                ids.add_run(num_rows, num_rows + 16)
                free.update(range(num_rows, num_rows + 16))
                num_rows += 16
            first = ids.take(chance.randrange(1, 12))
            run = list(range(first, ids.first))
            assert run
            assert free.issuperset(run)
            free.difference_update(run)
            taken += run
        assert sorted(ids) == sorted(free)


def test_a_chain_that_goes_tail_first_gives_its_ids_back_as_one_run() -> None:
    ids = FreeIds()
    ids.add_run(1, 100)
    first = ids.take(50)
    assert (first, ids.first) == (1, 51)
    other = ids.take(49)
    assert (other, ids.first, ids.end) == (51, 100, 100)
    for block in range(50, 0, -1):
        ids.give_back(block)
    assert (ids.first, ids.end) == (1, 51)
