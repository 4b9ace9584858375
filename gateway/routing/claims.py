"""Claims: what one endpoint is believed to hold beyond the bits in the holder sets.

Owns the record that the prefix index keeps; the index alone writes it. It must never outlive a purge as more than an
empty shell: an open bet keeps the claims object it was placed on, not an endpoint's name.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gateway.routing.lanes import ONE, REFERENCES_MAX

if TYPE_CHECKING:
    from gateway.routing.bets import Speculation

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

    def count(self, block: int, counts: int) -> int:
        """`block` has these references. Returns by how many `references` grew."""
        before = len(self.references)
        if counts == ONE:
            self.references.pop(block, None)
        else:
            self.references[block] = counts
        return len(self.references) - before

    def reference(self, blocks: Iterable[int], shift: int, bits_of: Callable[[int, Claims], int]) -> int:
        """One more reference on each of `blocks` in the lane of `shift`; the first one confirms, which the masks,
        that `bits_of` reads, do not say yet. Returns by how much references and stakes grew."""
        references, stakes, confirmed_bit = self.references, self.stakes, self.confirmed_bit
        before = len(references) + len(stakes)
        for block in blocks:
            if bits_of(block, self) & confirmed_bit:
                counts = references.get(block, ONE)
                if counts >> shift & REFERENCES_MAX < REFERENCES_MAX:
                    self.count(block, counts + (1 << shift))
                continue
            self.num_confirmed += 1
            stakes.pop(block, None)
            if shift:
                self.count(block, 1 << shift)
        return len(references) + len(stakes) - before

    def stake(self, blocks: Iterable[int], serial: int, bits_of: Callable[[int, Claims], int]) -> array[int]:
        """One more bet, of this serial, on each of `blocks` that is not confirmed; returns those."""
        stakes, confirmed_bit = self.stakes, self.confirmed_bit
        first = serial << STAKE_COUNT_BITS | 1
        unconfirmed = array("i")
        for block in blocks:
            stake = stakes.get(block)
            if stake is None:
                if bits_of(block, self) & confirmed_bit:
                    continue
                stakes[block] = first
            else:
                stakes[block] = stake + 1
            unconfirmed.append(block)
        return unconfirmed

    def clear(self) -> None:
        """The endpoint is gone: open bets find nothing here any more."""
        self.references.clear()
        self.stakes.clear()
        self.history.clear()
        self.num_confirmed = self.num_unreached = 0
