"""The roster: which endpoint owns which bits of a mask, and bits back into matches by name.

Owns the slots. A slot of an endpoint that is gone is given to another only when its bits have left every mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gateway.routing.claims import BITS_A_SLOT, SLOT_MASK, Claims

NAME_SETS_MAX = 4096
PLAIN_MATCHES_MAX = 4096


class Match(NamedTuple):
    """How much of a prompt an endpoint holds. Consecutive from the first block on; a gap ends the match.

    `speculative_blocks` are those beyond the confirmed run that hold when speculative claims count too.
    `slow_blocks` are the last of the confirmed ones, from the first on that has to be loaded from a slower tier.
    """

    confirmed_blocks: int
    speculative_blocks: int
    slow_blocks: int = 0


NO_MATCH = Match(0, 0)


class _PlainMatches(dict[int, Match]):
    """By depth, the match of an endpoint that is confirmed to hold as much in a fast tier, as most are."""

    def __missing__(self, depth: int) -> Match:
        if len(self) >= PLAIN_MATCHES_MAX:
            self.clear()
        match = self[depth] = Match(depth, 0)
        return match


class Roster:
    """Claims by endpoint id and by slot."""

    def __init__(self) -> None:
        self.by_id: dict[str, Claims] = {}
        self.slots: list[Claims | None] = []
        self._retired: set[int] = set()
        self._every_confirmed = 0
        self._names: dict[int, tuple[str, ...] | None] = {}
        self._plain = _PlainMatches()

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

    def matches(self, depths: Sequence[int], ends: Sequence[int]) -> dict[str, Match]:
        """A match for each endpoint: `ends` are the bits whose reach ends at each of `depths`, ascending."""
        matches: dict[str, Match] = {}
        remembered, plain = self._names, self._plain
        for depth, lost in zip(depths, ends, strict=True):
            try:
                names = remembered[lost]
            except KeyError:
                names = self._remember(lost)
            if names is None:
                self._match_apart(matches, depth, lost)
            elif len(names) == 1:
                matches[names[0]] = plain[depth]
            else:
                matches.update(dict.fromkeys(names, plain[depth]))
        return matches

    def _match_apart(self, matches: dict[str, Match], depth: int, lost: int) -> None:
        """Where fast, confirmed and speculative reach end, in this order, at depths of their own."""
        for claims in self.owners(lost):
            num_confirmed, num_speculative, num_slow = matches.get(claims.endpoint_id, NO_MATCH)
            if lost & claims.fast_bit:
                num_confirmed = depth
            if lost & claims.confirmed_bit:
                num_confirmed, num_slow = depth, depth - num_confirmed
            if lost & claims.any_bit:
                num_speculative = depth - num_confirmed
            matches[claims.endpoint_id] = Match(num_confirmed, num_speculative, num_slow)

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
