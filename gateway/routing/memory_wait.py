"""When an endpoint will have room for one more prompt: its streams end one by one, and those before us go first.

Owns the reckoning, no state. It must never read a clock or a ledger: streams come in as values, in the order in which
they were sent there, which is the order of admission.

A worker admits a prompt when the whole of it fits, first come first served. So: every stream that has begun gives its
memory back when its answer is expected to end; each that waits takes what it needs as soon as it is there, and gives
it back a life after its prompt has been computed; then it is our turn. Prompts are computed one after the other.

Known approximations: memory that several streams share is given back by the last of them that was sent; what other
gateways run there ends as our own streams do; what an answer holds grows no further while we wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import nan
from typing import NamedTuple

import numpy as np

from gateway.routing.output_length import UNKNOWN_LENGTHS, LengthProfile


class Stream(NamedTuple):
    """One request on an endpoint. `held_tokens` is what it takes there and nobody uses longer, half of its answer
    included; `began_at` its first byte, None while it waits; `chain` the hashes of its prompt's blocks;
    `inherited_tokens` others have taken, and it is the last to use them."""

    held_tokens: int
    prefill_tokens: int
    output_tokens: int
    began_at: float | None
    chain: Sequence[int] = ()
    inherited_tokens: int = 0


class Streams(list[Stream]):
    """An endpoint's, in the order of admission. Nobody changes them."""

    __slots__ = ("_columns",)

    def __init__(self, streams: Iterable[Stream] = ()) -> None:
        super().__init__(streams)
        self._columns: np.ndarray | None = None

    @property
    def columns(self) -> np.ndarray:
        """A row each: tokens held, output expected, the instant of the first byte (not a number without one), tokens
        inherited."""
        if self._columns is None:
            self._columns = np.array([[stream.held_tokens for stream in self],
                                      [stream.output_tokens for stream in self],
                                      [nan if stream.began_at is None else stream.began_at for stream in self],
                                      [stream.inherited_tokens for stream in self]])
        return self._columns


class Occupancy(NamedTuple):
    """What the reckoning needs of an endpoint. `free_tokens` are left when all that waits has been let in, below zero
    when there is not enough for it; `reserve_tokens` it keeps free while anybody runs; `token_s` computes a token of
    a prompt, `pace_s` generates one; `lengths` are those of answers; each of `streams` stands for `scale` of
    those that really run there."""

    streams: Sequence[Stream]
    free_tokens: float
    reserve_tokens: float
    token_s: float
    pace_s: float
    now: float
    lengths: LengthProfile = UNKNOWN_LENGTHS
    scale: float = 1.0


def shared_blocks(theirs: Sequence[int], chain: Sequence[int], start: int, end: int) -> int:
    """As far as which block, from `start` on and `end` at most, two chains are one; `start` if they part before it.

    Hashes are chained: equal at one block, equal before it.
    """
    last = len(theirs) if len(theirs) < end else end
    if last <= start or theirs[start] != chain[start]:
        return start
    if theirs[last - 1] == chain[last - 1]:
        return last
    low, high = start + 1, last - 1
    while low < high:
        middle = (low + high + 1) // 2
        if theirs[middle - 1] == chain[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def held_blocks(streams: Sequence[Stream], chain: Sequence[int], depth: int) -> int:
    """How many of the first `depth` blocks of this prompt a stream keeps in memory."""
    held = 0
    for _, _, _, _, theirs, _ in streams:
        if held >= depth:
            break
        if held < len(theirs) and theirs[held] == chain[held]:
            held = shared_blocks(theirs, chain, held, depth)
    return held


def begins_in_s(occupancy: Occupancy, needed_tokens: float) -> tuple[float, float]:
    """Seconds until a prompt that needs so much memory would be computed, if it were sent there now; and how many
    tokens would be missing even when everybody who was sent there before has ended."""
    waiting, ends = _apart(occupancy)
    _, free, reserve, token_s, pace_s, _, _, scale = occupancy
    free += sum(held for held, _ in waiting)
    heapify(ends)
    room_at = computed_at = 0.0
    for held, stream in waiting:
        least = held - 0.5 * stream.output_tokens * scale   # its answer comes later
        while ends and free - reserve < least:
            room_at, freed = _next_end(ends, room_at)
            free += freed
        computed_at = max(computed_at, room_at) + stream.prefill_tokens * token_s
        free -= held
        heappush(ends, (computed_at + stream.output_tokens * pace_s, held + stream.inherited_tokens))
    while ends and free - reserve < needed_tokens:
        room_at, freed = _next_end(ends, room_at)
        free += freed
    return max(computed_at, room_at), max(0.0, needed_tokens - free)


def _apart(occupancy: Occupancy) -> tuple[list[tuple[float, Stream]], list[tuple[float, float]]]:
    """Who waits, first come first, with what he will hold; when each of the others ends, with what he gives back."""
    streams, _, _, _, pace_s, now, lengths, scale = occupancy
    waiting: list[tuple[float, Stream]] = []
    ends: list[tuple[float, float]] = []
    left = lengths.left
    for stream in streams:
        held_tokens, _, output_tokens, began_at, _, inherited = stream
        held = held_tokens * scale
        if began_at is None:
            waiting.append((held, stream))
        else:
            ends.append((left((now - began_at) / pace_s, output_tokens) * pace_s, held + inherited))
    return waiting, ends


def _next_end(ends: list[tuple[float, float]], room_at: float) -> tuple[float, float]:
    end_at, freed = heappop(ends)
    return max(end_at, room_at), freed
