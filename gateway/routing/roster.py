"""The roster: which endpoint owns which bits of a mask, and bits back into matches by name.

Owns the slots. A slot of an endpoint that is gone is given to another only when its bits have left every mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gateway.routing.claims import BITS_A_SLOT, SLOT_MASK, Claims

NAME_SETS_MAX = 4096


class Match(NamedTuple):
    """How much of a prompt an endpoint holds. Consecutive from the first block on; a gap ends the match.

    `speculative_blocks` are those beyond the confirmed run that hold when speculative claims count too.
    `slow_blocks` are the last of the confirmed ones, from the first on that has to be loaded from a slower tier.
    """

    confirmed_blocks: int
    speculative_blocks: int
    slow_blocks: int = 0


NO_MATCH = Match(0, 0)
_new_tuple = tuple.__new__


class Roster:
    """Claims by endpoint id and by slot."""

    def __init__(self) -> None:
        self.by_id: dict[str, Claims] = {}
        self.slots: list[Claims | None] = []
        self._retired: set[int] = set()
        self._every_confirmed = 0
        self._names: dict[int, tuple[str, ...] | None] = {}

    def join(self, endpoint_id: str) -> Claims:
        """A new endpoint, in the first slot that is free."""
        slots = self.slots
        slot = next((slot for slot, claims in enumerate(slots) if claims is None and slot not in self._retired),
                    len(slots))
        claims = self.by_id[endpoint_id] = Claims(endpoint_id, slot)
        slots[slot:slot + 1] = [claims]
        self._every_confirmed = ((1 << BITS_A_SLOT * len(slots)) - 1) // SLOT_MASK  # 0b…001001
        self._names.clear()
        return claims

    def retire(self, endpoint_id: str) -> Claims | None:
        """The endpoint is gone; its bits are not, until recycle()."""
        claims = self.by_id.pop(endpoint_id, None)
        if claims is not None:
            self.slots[claims.slot] = None
            self._retired.add(claims.slot)
            self._names.clear()
        return claims

    def recycle(self, bits: int) -> None:
        """No mask has any of `bits` any more: their slots are free."""
        self._retired = {slot for slot in self._retired if not bits >> BITS_A_SLOT * slot & SLOT_MASK}

    def owners(self, bits: int) -> Iterator[Claims]:
        """Of these bits, whoever is still there."""
        while bits:
            slot = ((bits & -bits).bit_length() - 1) // BITS_A_SLOT
            bits &= ~(SLOT_MASK << BITS_A_SLOT * slot)
            claims = self.slots[slot]
            if claims is not None:
                yield claims

    def matches(self, ends: Iterable[tuple[int, int]]) -> dict[str, Match]:
        """From (depth, bits whose reach ends there), ascending, to a match for each endpoint."""
        matches: dict[str, Match] = {}
        confirmed: dict[str, int] = {}
        fast: dict[str, int] = {}
        remembered = self._names
        for depth, lost in ends:
            names = remembered[lost] if lost in remembered else self._remember(lost)
            if names is not None:
                # A new tuple as Match(depth, 0), in half the time.
                matches.update(dict.fromkeys(names, _new_tuple(Match, (depth, 0, 0))))
                continue
            for claims in self.owners(lost):
                endpoint_id = claims.endpoint_id
                if lost & claims.fast_bit:
                    fast[endpoint_id] = depth
                if lost & claims.confirmed_bit:
                    confirmed[endpoint_id] = depth
                if lost & claims.any_bit:
                    num_confirmed = confirmed.get(endpoint_id, 0)
                    matches[endpoint_id] = Match(num_confirmed, depth - num_confirmed,
                                                 num_confirmed - fast.get(endpoint_id, 0))
        return matches

    def _remember(self, lost: int) -> tuple[str, ...] | None:
        """Whose bits these are, when each has all of its bits among them: the usual case, nothing speculative and
        nothing slow, and prompts share holders. Otherwise None."""
        every = self._every_confirmed
        names = None
        if lost & every == lost >> 1 & every == lost >> 2 & every:
            names = tuple(claims.endpoint_id for claims in self.owners(lost & every))
        if len(self._names) >= NAME_SETS_MAX:
            self._names.clear()
        self._names[lost] = names
        return names
