"""Bets: the speculation of one booking, and those that are open, by expiry.

Owns their order and their count. What a bet means for a block is the prefix index's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from msgspec import Struct

from gateway.routing.claims import Claims

VOID_BETS_MAX = 256
LOOK_AGAIN_S = 5.0   # at a bet that is held
_NO_BLOCKS = array("i")   # nobody adds to it


class Speculation(Struct, eq=False, gc=False):
    """The bet of one booking. Give it to withdraw() when the request failed before its first byte.

    It is on blocks of the tree, or *unplaced* (unplaced_bets.py): then on the hashes of `chain` from `depth` on.
    """

    claims: Claims
    expires_at: float
    serial: int
    chain: Sequence[int] = ()
    depth: int = 0
    _blocks: array[int] = _NO_BLOCKS
    _ttl_s: float = 0.0

    def place(self, blocks: array[int]) -> None:
        """It is on these blocks, and no longer unplaced."""
        self._blocks, self.chain, self.depth = blocks, (), 0

    def hold(self, ttl_s: float) -> None:
        """It does not expire before settle(), and then `ttl_s` later: however long the request waits at its worker,
        whoever comes after it finds what it will have computed."""
        self.expires_at, self._ttl_s = inf, ttl_s

    def settle(self, now: float) -> None:
        """The prompt has been computed, or never will be. Only the first time counts."""
        self.expires_at = min(self.expires_at, now + self._ttl_s)

    @property
    def is_held(self) -> bool:
        """Between hold() and settle()."""
        return self.expires_at == inf

    @property
    def endpoint_id(self) -> str:
        return self.claims.endpoint_id

    @property
    def num_blocks(self) -> int:
        """Blocks still bet on; 0 when it was taken back or has expired."""
        return len(self._blocks) or len(self.chain) - self.depth

    def take(self) -> array[int]:
        """Which blocks, first to last; the second time there are none."""
        blocks = self._blocks
        self.place(_NO_BLOCKS)
        return blocks


class OpenBets:
    """Every bet that somebody placed and nobody has taken back; those that were stay a while, void."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._heap: list[tuple[float, int, Speculation]] = []  # the serial decides, so bets are never compared
        self._num_void = 0

    def __len__(self) -> int:
        return len(self._heap)

    def place(self, bet: Speculation) -> None:
        """`bet` is on at least one block."""
        self.num_blocks += bet.num_blocks
        heappush(self._heap, (bet.expires_at, bet.serial, bet))
        if self._num_void > len(self._heap) // 2 + VOID_BETS_MAX:
            self._forget_void()

    def take(self, bet: Speculation) -> array[int]:
        """See Speculation.take(); the bet is void from now on."""
        num_blocks = bet.num_blocks
        if num_blocks:
            self.num_blocks -= num_blocks
            self._num_void += 1
        return bet.take()

    def shrank(self, bet: Speculation, num_before: int) -> None:
        """It is on other blocks than before, which were so many."""
        self.num_blocks += bet.num_blocks - num_before
        self._num_void += not bet.num_blocks

    def is_due(self, now: float) -> bool:
        """Whether some bet is past due."""
        return bool(self._heap) and self._heap[0][0] <= now

    def due(self, now: float) -> Iterator[Speculation]:
        """The bets that are past due and not held; the caller takes each."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            bet = heap[0][2]
            if bet.expires_at > now and bet.num_blocks:  # it was put off
                heapreplace(heap, (min(bet.expires_at, now + LOOK_AGAIN_S), bet.serial, bet))
                continue
            yield bet
            heappop(heap)
            self._num_void -= 1
        if self._num_void > len(heap) // 2 + VOID_BETS_MAX:
            self._forget_void()

    def _forget_void(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].num_blocks]
        heapify(self._heap)
        self._num_void = 0

    def check_invariants(self) -> None:
        """AssertionError names what is wrong."""
        assert self._num_void == sum(not bet.num_blocks for _, _, bet in self._heap), "void bets are miscounted"
        assert self.num_blocks == sum(bet.num_blocks for _, _, bet in self._heap), "blocks bet on are miscounted"
