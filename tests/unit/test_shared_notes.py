"""Notes between event loops on real sockets: turns, bets in one note, and what is lost without harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.shared import notes as module
from gateway.shared.notes import Notes, SharedBet, note_sockets

BET = SharedBet("10.0.0.1:8100", "epoch-é", 123.5, (1, 2**64 - 1, 7))


class Two:
    """Rows 0 and 1, both living; row 2 is not."""

    def __init__(self) -> None:
        sockets = [note_sockets() for _ in range(3)]
        self.ends = [end for pair in sockets for end in pair]
        outlets = {row: outlet for row, (_, outlet) in enumerate(sockets)}
        self.notes = [Notes(sockets[row][0], {other: end for other, end in outlets.items() if other != row},
                            lambda: [0, 1]) for row in range(2)]
        self.bets: list[SharedBet] = []
        self.turns = 0
        self.heard = asyncio.Event()
        self.notes[1].on_bet = self._bet
        self.notes[1].on_turn = self._turn

    def _bet(self, bet: SharedBet) -> None:
        self.bets.append(bet)
        self.heard.set()

    def _turn(self) -> None:
        self.turns += 1
        self.heard.set()


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    found = Two()
    yield found
    for end in found.ends:
        end.close()


async def test_bets_of_one_turn_travel_together_and_arrive_as_they_were(two: Two) -> None:
    two.notes[1].start()
    long = SharedBet("w", "e", 1.0, tuple(range(4000)))
    for bet in (BET, long, BET):
        two.notes[0].tell_bet(bet)
    assert not two.bets, "said at the end of the turn"
    async with asyncio.timeout(10):
        while len(two.bets) < 3:
            two.heard.clear()
            await two.heard.wait()
    assert two.bets == [BET, long, BET]
    assert two.notes[0].num_lost == 0
    two.notes[1].close()


async def test_a_turn_is_passed_on(two: Two) -> None:
    two.notes[1].start()
    two.notes[0].your_turn(1)
    async with asyncio.timeout(10):
        await two.heard.wait()
    assert (two.turns, two.bets) == (1, [])
    two.notes[1].close()


async def test_what_was_meant_for_the_process_before_is_not_read(two: Two) -> None:
    two.notes[0].your_turn(1)
    two.notes[1].start()
    two.notes[0].tell_bet(BET)
    async with asyncio.timeout(10):
        await two.heard.wait()
    assert (two.turns, two.bets) == (0, [BET])
    two.notes[1].close()


async def test_a_full_inbox_and_a_bet_that_is_too_long_are_nobodys_problem(two: Two) -> None:
    for _ in range(5000):
        two.notes[0].your_turn(1)
        if two.notes[0].num_lost:
            break
    assert two.notes[0].num_lost == 1
    two.notes[1].start()
    two.notes[0].tell_bet(SharedBet("w", "e", 1.0, tuple(range(module.BET_MAX_BLOCKS + 1))))
    two.notes[0].tell_bet(BET)
    async with asyncio.timeout(10):
        await two.heard.wait()
    assert two.bets == [BET]
    two.notes[1].close()
