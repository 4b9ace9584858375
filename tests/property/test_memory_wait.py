"""When there will be room, against a model that looks at every instant in turn; and what never makes it sooner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.memory_wait import Occupancy, Stream, begins_in_s, held_blocks
from gateway.routing.output_length import DEFAULT_OUTPUT_TOKENS

PACE_S, TOKEN_S, NOW = 0.01, 0.001, 50.0
streams = st.lists(st.builds(Stream, st.integers(50, 900), st.integers(0, 400), st.integers(1, 300),
                             st.none() | st.floats(45.0, NOW), st.just(()), st.integers(0, 600)), max_size=8)
free_tokens = st.integers(-2000, 1500)
needed_tokens = st.integers(1, 2500)


def occupancy(given_streams: list[Stream], free: float) -> Occupancy:
    return Occupancy(given_streams, free, 10.0, TOKEN_S, PACE_S, NOW)


def naive(given_streams: list[Stream], free: float, needed: float) -> float:
    """Instants from now on, sorted anew after each; whoever is first in line goes as soon as he fits."""
    ends = []
    line: list[tuple[float, float, Stream | None]] = []
    for stream in given_streams:
        if stream.began_at is None:
            free += stream.held_tokens
            line.append((stream.held_tokens - stream.output_tokens / 2, stream.held_tokens, stream))
        else:
            expected, generated = stream.output_tokens, (NOW - stream.began_at) / PACE_S
            least = 0.25 * expected if expected < DEFAULT_OUTPUT_TOKENS - 1 else max(expected, generated)
            freed = float(stream.held_tokens + stream.inherited_tokens)
            ends.append((max(expected - generated, least) * PACE_S, freed))
    line.append((needed, needed, None))
    clock = computed = 0.0
    for least, held, stream in line:
        while free - 10.0 < least and ends:
            ends.sort()
            at, freed = ends.pop(0)
            clock, free = max(clock, at), free + freed
        computed = max(computed, clock)
        if stream is not None:
            computed += stream.prefill_tokens * TOKEN_S
            free -= held
            ends.append((computed + stream.output_tokens * PACE_S, held + stream.inherited_tokens))
    return computed


@given(streams, free_tokens, needed_tokens)
def test_it_is_what_a_walk_over_the_instants_finds(some: list[Stream], free: int, needed: int) -> None:
    begins_s, missing = begins_in_s(occupancy(some, free), needed)
    assert abs(begins_s - naive(some, free, needed)) < 1e-9
    assert missing >= 0


@given(streams, free_tokens, needed_tokens, st.integers(0, 1000))
def test_needing_more_or_having_less_is_never_sooner(some: list[Stream], free: int, needed: int, more: int) -> None:
    begins_s, missing = begins_in_s(occupancy(some, free), needed)
    for other in (begins_in_s(occupancy(some, free), needed + more),
                  begins_in_s(occupancy(some, free - more), needed)):
        assert other[0] >= begins_s
        assert other[1] >= missing


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=4), st.lists(st.integers(0, 1), max_size=6))
def test_blocks_held_are_the_longest_beginning_that_a_stream_has(others: list[list[int]], own: list[int]) -> None:
    def chain(bits: list[int]) -> list[int]:
        return [hash((*bits[:end],)) for end in range(1, len(bits) + 1)]

    def common(bits: list[int]) -> int:
        return next((at for at, (mine, theirs) in enumerate(zip(own, bits, strict=False)) if mine != theirs),
                    min(len(own), len(bits)))
    there = [Stream(1, 1, 1, None, chain(bits)) for bits in others]
    for depth in range(len(own) + 1):
        expected = min(depth, max(map(common, others), default=0))
        assert held_blocks(there, chain(own), depth) == expected
