"""Hot prefixes: counted from the second sighting on, bounded, the coldest first to go."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.hot_prefixes import BLOCKS_MIN, HALF_LIFE_S, HotPrefixes, Sighting


def sighting(first: int, depth: int = 8, own: int = 0) -> Sighting:
    """A prompt of `depth` known blocks and two of its own; its tokens are its block's number."""
    chain = [first * 1000 + index for index in range(depth)] + [10**6 + own, 10**6 + own + 1]
    return Sighting("m", chain, depth, [first * 1000 + index // 4 for index in range(4 * len(chain))], 4, b"salt", 16)


def test_a_prefix_counts_from_its_second_sighting_on() -> None:
    hot = HotPrefixes()
    hot.note(sighting(1, own=1), 0.0)
    assert len(hot) == 0
    for number in range(3):
        hot.note(sighting(1, own=2 + number), 1.0)
    [(key, prefix)] = hot.hottest(10, 1.0)
    assert key == 1007
    assert (prefix.num_hits, prefix.num_tokens, prefix.chain) == (4, 32, tuple(range(1000, 1008)))
    assert prefix.token_ids() == [1000 + index // 4 for index in range(32)]
    assert (prefix.salt, prefix.salt_from) == (b"salt", 16)
    assert hot.get(1007) is prefix
    assert hot.get(1006) is None


def test_a_conversation_that_grows_fills_nothing_and_short_ones_neither() -> None:
    hot = HotPrefixes()
    for depth in range(1, 60):
        hot.note(sighting(1, depth), float(depth))
    for _ in range(5):
        hot.note(sighting(2, BLOCKS_MIN - 1), 60.0)
    assert len(hot) == 0


def test_what_was_hot_cools_down() -> None:
    hot = HotPrefixes()
    for _ in range(20):
        hot.note(sighting(1), 0.0)
    for _ in range(4):
        hot.note(sighting(2), 0.0)
    assert [key for key, _ in hot.hottest(1, 0.0)] == [1007]
    later = 5 * HALF_LIFE_S
    for _ in range(3):
        hot.note(sighting(2), later)
    assert [key for key, _ in hot.hottest(1, later)] == [2007]


def test_bounds_hold_whatever_comes_and_the_hottest_stays() -> None:
    draw, hot = random.Random(1), HotPrefixes(prefixes_max=5, tokens_max=200)
    for step in range(3000):
        hot.note(sighting(0), float(step))
        hot.note(sighting(draw.randrange(1, 40), draw.randrange(BLOCKS_MIN, 80)), float(step))
        assert len(hot) <= 5
        assert hot.num_tokens == sum(prefix.num_tokens for _, prefix in hot.hottest(99, float(step))) <= 200
    assert hot.get(7) is not None


def test_one_more_hit_of_a_listed_prefix_needs_no_sighting() -> None:
    hot, again = HotPrefixes(), HotPrefixes()
    for number in range(2):
        hot.note(sighting(1, own=number), 0.0)
        again.note(sighting(1, own=number), 0.0)
    chain = sighting(1).chain
    assert not hot.hit(chain, 7, 5.0), "another prefix"
    assert not hot.hit(chain, BLOCKS_MIN - 1, 5.0)
    assert hot.hit(chain, 8, 5.0)
    again.note(sighting(1), 5.0)
    assert hot.hottest(9, 6.0) == again.hottest(9, 6.0)


class Naive(HotPrefixes):
    """Looks at everybody for the coldest."""

    def _take_coldest(self) -> int:
        keys = [key for _, key in self._coldest]
        coldest = min(keys, key=lambda key: (self._prefixes[key].rank, key))
        self._coldest = [entry for entry in self._coldest if entry[1] != coldest]
        return coldest


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(BLOCKS_MIN, 9), st.floats(0, 400)), max_size=200))
def test_who_goes_is_the_coldest(asked: list[tuple[int, int, float]]) -> None:
    ours, naive, now = HotPrefixes(prefixes_max=4, tokens_max=120), Naive(prefixes_max=4, tokens_max=120), 0.0
    for first, depth, pause_s in asked:
        now += pause_s
        for hot in (ours, naive):
            hot.note(sighting(first, depth), now)
        assert ours.hottest(9, now) == naive.hottest(9, now)
