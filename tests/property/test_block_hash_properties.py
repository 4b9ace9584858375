"""The chain against a naive model that spells the message out, and the ways to build it against each other."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from worker.protocol.block_hash import (
    ChainHasher,
    ExtraKey,
    HashScheme,
    block_hashes,
    continue_chain,
    extra_keys_of_block,
    pack_tokens,
    unpack_tokens,
)

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
block_sizes = st.integers(1, 9)
extra_keys = st.lists(
    st.builds(ExtraKey, st.integers(1, 255), st.binary(max_size=12), st.integers(0, 50)), max_size=4)


def scheme(block_size: int) -> HashScheme:
    return HashScheme(block_size, b"seed", "m", "w", "t", "c", "float32", "strict")


def naive(ids: list[int], size: int, keys: list[ExtraKey]) -> list[int]:
    parent = scheme(size).root()
    hashes = []
    for block in range(len(ids) // size):
        message = b"".join(struct.pack("<I", token) for token in ids[block * size:(block + 1) * size])
        here = sorted({(key.start - block * size, key.kind, key.value) for key in keys if key.start // size == block})
        if here:
            message += struct.pack("<I", len(here))
            for start, kind, value in here:
                message += struct.pack("<BII", kind, start, len(value)) + value
        parent = xxh3_64_intdigest(message, parent)
        hashes.append(parent)
    return hashes


@given(token_ids, block_sizes, extra_keys)
def test_equals_the_naive_chain(ids: list[int], size: int, keys: list[ExtraKey]) -> None:
    assert block_hashes(ids, scheme(size), keys) == naive(ids, size, keys)
    assert block_hashes(array("I", ids), scheme(size), keys) == naive(ids, size, keys)


@given(token_ids, block_sizes, extra_keys, st.randoms(use_true_random=False))
def test_order_and_repetition_of_extra_keys_carry_no_meaning(ids: list[int], size: int, keys: list[ExtraKey],
                                                             random: object) -> None:
    shuffled = keys + keys[:1]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert block_hashes(ids, scheme(size), shuffled) == block_hashes(ids, scheme(size), keys)


@given(token_ids, block_sizes, extra_keys, st.lists(st.integers(0, 7), max_size=12))
def test_growing_equals_whole(ids: list[int], size: int, keys: list[ExtraKey], cuts: list[int]) -> None:
    hasher = ChainHasher(scheme(size), keys)
    returned, at = [], 0
    for cut in [*cuts, len(ids)]:
        returned += hasher.append(ids[at:at + cut])
        at += cut
    assert returned == hasher.hashes == block_hashes(ids, scheme(size), keys)


@given(token_ids, block_sizes, extra_keys, st.integers(0, 40))
def test_an_event_reader_continues_the_chain_from_any_block(ids: list[int], size: int, keys: list[ExtraKey],
                                                            start: int) -> None:
    whole = block_hashes(ids, scheme(size), keys)
    first = min(start, len(whole))
    parent = whole[first - 1] if first else scheme(size).root()
    of_blocks = [extra_keys_of_block(index, size, keys) for index in range(first, len(whole))]
    assert continue_chain(parent, ids[first * size:], scheme(size), of_blocks) == whole[first:]


@given(token_ids, block_sizes, st.binary(min_size=1, max_size=8), st.integers(0, 50))
def test_a_salt_splits_exactly_from_its_block_on(ids: list[int], size: int, salt: bytes, start: int) -> None:
    plain = block_hashes(ids, scheme(size))
    salted = block_hashes(ids, scheme(size), [ExtraKey(2, salt, start)])
    shared = min(start // size, len(plain))
    assert salted[:shared] == plain[:shared]
    assert not set(salted[shared:]) & set(plain[shared:])


@given(token_ids)
def test_tokens_pack_and_unpack(ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(ids)) == ids


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_outside_u32_is_our_bug(bad: int) -> None:
    with pytest.raises(AssertionError, match="u32"):
        block_hashes([1, bad], scheme(2))


@pytest.mark.parametrize("key", [ExtraKey(0, b""), ExtraKey(256, b""), ExtraKey(1, b"", -1)])
def test_a_nonsense_extra_key_is_our_bug(key: ExtraKey) -> None:
    with pytest.raises(AssertionError):
        block_hashes([1, 2], scheme(2), [key])
