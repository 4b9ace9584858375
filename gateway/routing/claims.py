"""Claims: what one endpoint is believed to hold, and the bet of one booking.

Owns the two records that the prefix index keeps; the index alone writes them. They must never outlive a purge as more
than an empty shell: an open bet keeps the claims object it was placed on, not an endpoint's name.
"""

from __future__ import annotations


class Claims:
    """What one endpoint claims. Of its two mask bits, `confirmed_bit` wants confirmed claims all the way down a
    chain, `any_bit` is content with either kind. No block is in both dicts."""

    __slots__ = ("any_bit", "confirmed_bit", "endpoint_id", "references", "slot", "stakes")

    def __init__(self, endpoint_id: str, slot: int) -> None:
        self.endpoint_id = endpoint_id
        self.slot = slot
        self.confirmed_bit = 1 << 2 * slot
        self.any_bit = 2 << 2 * slot
        self.references: dict[int, int] = {}  # block -> counts, 16 bits for each lane
        self.stakes: dict[int, tuple[int, ...]] = {}  # block -> serials of the speculations that bet on it

    @property
    def bits(self) -> int:
        return self.confirmed_bit | self.any_bit

    def bits_of(self, block: int) -> int:
        if block in self.references:
            return self.bits
        return self.any_bit if block in self.stakes else 0


class Speculation:
    """The bet of one booking. Give it to withdraw() when the request failed before its first byte."""

    __slots__ = ("_blocks", "_claims", "expires_at", "serial")

    def __init__(self, claims: Claims, blocks: list[int], expires_at: float, serial: int) -> None:
        self._claims = claims
        self._blocks = blocks
        self.expires_at = expires_at
        self.serial = serial

    @property
    def endpoint_id(self) -> str:
        return self._claims.endpoint_id

    @property
    def num_blocks(self) -> int:
        """Blocks that the bet added; the others were known to be there."""
        return len(self._blocks)

    def take(self) -> tuple[Claims, list[int]]:
        """Whose claims and which blocks, first to last; the second time there are none."""
        blocks, self._blocks = self._blocks, []
        return self._claims, blocks

    def __lt__(self, other: Speculation) -> bool:
        return (self.expires_at, self.serial) < (other.expires_at, other.serial)
