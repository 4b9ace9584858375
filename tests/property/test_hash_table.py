"""Keys into the hash table, one by one, in turn or all at once, against a dict."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.hash_table import AT_ONCE_MIN, HashTable

LENGTHS = st.lists(st.sampled_from([1, 3, AT_ONCE_MIN - 1, AT_ONCE_MIN, 600]), min_size=1, max_size=8)
ODDITIES = ("none", "none", "none", "known", "twice", "zero", "crowded")


def run_of(chance: random.Random, length: int, known: list[int]) -> list[int]:
    """A run in which something may be odd: a key that is there, one that comes twice, 0, many in one bucket."""
    oddity = chance.choice(ODDITIES)
    step = 1 << 20 if oddity == "crowded" else 1
    keys = [chance.getrandbits(63) * step % (1 << 64) | 1 for _ in range(length)]
    if oddity == "known" and known:
        keys[chance.randrange(length)] = chance.choice(known)
    elif oddity == "twice":
        keys[chance.randrange(length)] = keys[chance.randrange(length)]
    elif oddity == "zero":
        keys[chance.randrange(length)] = 0
    return keys


def insert(table: HashTable, keys: Sequence[int], ids: Sequence[int]) -> int:
    """How many went in."""
    if len(keys) > 1:
        return table.insert_each(keys, ids)
    return int(table.insert(keys[0], ids[0]))


@given(st.randoms(use_true_random=False), LENGTHS)
def test_keys_go_in_up_to_the_first_that_is_there(chance: random.Random, lengths: list[int]) -> None:
    table, entries = HashTable(), dict[int, int]()
    table.add_rows(sum(lengths) + 1)
    first = 1
    for length in lengths:
        ids: Sequence[int] = range(first, first + length)
        first += length
        if chance.random() < 0.5:
            ids = [*ids[1::2], *ids[::2]]   # not in a row
        keys = run_of(chance, length, list(entries))
        num_new = next((at for at, key in enumerate(keys) if key in entries or key in keys[:at]), length)
        assert insert(table, keys, ids) == num_new
        entries.update(zip(keys[:num_new], ids[:num_new], strict=True))
        for key in chance.sample(list(entries), min(len(entries), 20)):
            table.delete(entries.pop(key))
        found = [entries.get(key, 0) for key in keys]
        assert [table.find(key) for key in keys] == found
        assert table.find_each(keys) == found[:next((at for at, entry in enumerate(found) if not entry), length)]
    assert {table.key_of[entry]: entry for entry in table.entries()} == entries
    table.check_invariants()
