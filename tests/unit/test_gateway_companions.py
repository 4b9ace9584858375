"""Who goes together, and who goes at once."""

from __future__ import annotations

import asyncio

from gateway.server.companions import TOGETHER_MAX, Companions


async def test_those_of_one_turn_go_together_when_it_has_ended() -> None:
    went: list[list[int]] = []
    companions: Companions[int] = Companions(went.append)

    for number in range(3):
        companions.add(number, is_alone=False)
    assert went == []
    await asyncio.sleep(0)
    companions.add(3, is_alone=False)
    await asyncio.sleep(0)

    assert went == [[0, 1, 2], [3]]


async def test_whoever_is_alone_goes_at_once() -> None:
    went: list[list[int]] = []
    companions: Companions[int] = Companions(went.append)

    companions.add(1, is_alone=True)
    assert went == [[1]]
    companions.add(2, is_alone=False)
    companions.add(3, is_alone=True)  # the one before has left meanwhile, or will see for itself
    assert went == [[1], [2, 3]]

    await asyncio.sleep(0)
    assert went == [[1], [2, 3]]


async def test_too_many_for_a_turn_go_in_the_next() -> None:
    went: list[list[int]] = []
    companions: Companions[int] = Companions(went.append)

    for number in range(TOGETHER_MAX + 1):
        companions.add(number, is_alone=False)
    await asyncio.sleep(0)
    assert went == [[*range(TOGETHER_MAX)]]
    await asyncio.sleep(0)

    assert went == [[*range(TOGETHER_MAX)], [TOGETHER_MAX]]
