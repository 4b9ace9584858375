"""Claims: what one endpoint is believed to hold beyond the bits in the holder sets, and the bet of one booking.

Owns the two records that the prefix index keeps; the index alone writes them. They must never outlive a purge as more
than an empty shell: an open bet keeps the claims object it was placed on, not an endpoint's name.
"""

from __future__ import annotations

from array import array
from collections import deque

BITS_A_SLOT = 3
SLOT_MASK = (1 << BITS_A_SLOT) - 1
STAKE_COUNT_BITS = 24
STAKE_COUNT_MASK = (1 << STAKE_COUNT_BITS) - 1


class Claims:
    """What one endpoint claims. Three mask bits: `confirmed_bit` for a block that its events told of, `any_bit` for
    that or a bet, `fast_bit` for a confirmed one in a fast tier.

    `references` has the confirmed blocks whose count is not simply one in the first lane: 16 bits for each lane.
    `stakes` has the blocks that bets are open on: the serial of the first of them and, below, how many. Bets older
    than that serial were settled by a confirmation since. No block is confirmed and staked.
    """

    __slots__ = ("any_bit", "bits", "confirmed_bit", "endpoint_id", "fast_bit", "history", "num_confirmed",
                 "num_unreached", "references", "slot", "stakes")

    def __init__(self, endpoint_id: str, slot: int) -> None:
        self.endpoint_id = endpoint_id
        self.slot = slot
        self.confirmed_bit = 1 << BITS_A_SLOT * slot
        self.any_bit = 2 << BITS_A_SLOT * slot
        self.fast_bit = 4 << BITS_A_SLOT * slot
        self.bits = self.confirmed_bit | self.any_bit | self.fast_bit
        self.references: dict[int, int] = {}
        self.stakes: dict[int, int] = {}
        self.history: deque[Speculation] = deque()  # bets that stand in for events, oldest first
        self.num_confirmed = 0
        self.num_unreached = 0  # blocks with a claim that a gap further up keeps from counting

    def clear(self) -> None:
        """The endpoint is gone: open bets find nothing here any more."""
        self.references.clear()
        self.stakes.clear()
        self.history.clear()
        self.num_confirmed = self.num_unreached = 0


class Speculation:
    """The bet of one booking. Give it to withdraw() when the request failed before its first byte."""

    __slots__ = ("_blocks", "_claims", "expires_at", "serial")

    def __init__(self, claims: Claims, blocks: array[int], expires_at: float, serial: int) -> None:
        self._claims = claims
        self._blocks = blocks
        self.expires_at = expires_at
        self.serial = serial

    @property
    def endpoint_id(self) -> str:
        return self._claims.endpoint_id

    @property
    def num_blocks(self) -> int:
        """Blocks still bet on; 0 when it was taken back or has expired."""
        return len(self._blocks)

    def take(self) -> tuple[Claims, array[int]]:
        """Whose claims and which blocks, first to last; the second time there are none."""
        blocks, self._blocks = self._blocks, array("i")
        return self._claims, blocks

    def __lt__(self, other: Speculation) -> bool:
        return (self.expires_at, self.serial) < (other.expires_at, other.serial)
