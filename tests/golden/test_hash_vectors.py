"""Pinned block hashes. A change here means a new VERSION in worker/protocol/block_hash.py in the same commit:
otherwise a new gateway and an old worker agree on a scheme and disagree on every hash."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.protocol.block_hash import VERSION, ExtraKey, ExtraKeyKind, HashScheme, block_hashes, continue_chain

SCHEME = HashScheme(block_size=4, seed=bytes(range(32)), model="m", weights="w", tokenizer="t", template="c",
                    kv_dtype="float32", exactness="strict")
TOKEN_IDS = [1, 2, 3, 4, 70_000, 6, 7, 8, 0xFFFF_FFFF, 0, 1, 2, 9]
PLAIN = [0xA2AE7B6FD8646C55, 0xF5937B657D46D2E9, 0xF48A719705F5E58B]


def test_scheme_vectors() -> None:
    assert VERSION == 1
    assert SCHEME.digest() == "23ddc927b727a6f81d21df3326135e567300187f4ad3f11597c73c6ea165e6df"
    assert SCHEME.root() == 0x3C329993D2712F1C


def test_plain_chain() -> None:
    assert block_hashes(TOKEN_IDS, SCHEME) == PLAIN


def test_salt_enters_where_it_starts_and_stays_in_the_chain() -> None:
    salted = block_hashes(TOKEN_IDS, SCHEME, (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"salt", 5),))
    assert salted == [PLAIN[0], 0x4C35231185611C88, 0x542D2D30E3CB5698]


def test_two_kinds_of_extra_key() -> None:
    keys = (ExtraKey(ExtraKeyKind.LORA, b"\x00\x01", 0), ExtraKey(ExtraKeyKind.MULTIMODAL, b"img", 9))
    assert block_hashes(TOKEN_IDS, SCHEME, keys) == [0x107C4FDB4F1E015F, 0xFFBD4255DFAFF210, 0x98157537453C6BC3]


@pytest.mark.parametrize("position", range(12))
@pytest.mark.parametrize("byte", range(4))
def test_flipping_any_token_byte_changes_its_block_and_all_after(position: int, byte: int) -> None:
    flipped = list(TOKEN_IDS)
    flipped[position] ^= 0xFF << (8 * byte)
    block = position // 4
    hashes = block_hashes(flipped, SCHEME)
    assert hashes[:block] == PLAIN[:block]
    assert all(ours != theirs for ours, theirs in zip(hashes[block:], PLAIN[block:], strict=True))


@pytest.mark.parametrize("byte", range(8))
def test_flipping_any_parent_byte_changes_the_hash(byte: int) -> None:
    assert continue_chain(PLAIN[0], TOKEN_IDS[4:8], SCHEME) == [PLAIN[1]]
    assert continue_chain(PLAIN[0] ^ (0xFF << (8 * byte)), TOKEN_IDS[4:8], SCHEME) != [PLAIN[1]]


@pytest.mark.parametrize("byte", range(32))
def test_flipping_any_seed_byte_changes_digest_and_every_hash(byte: int) -> None:
    seed = bytearray(SCHEME.seed)
    seed[byte] ^= 1
    other = replace(SCHEME, seed=bytes(seed))
    assert other.digest() != SCHEME.digest()
    assert not set(block_hashes(TOKEN_IDS, other)) & set(PLAIN)


@pytest.mark.parametrize(("field", "value"), [
    ("model", "n"), ("weights", "x"), ("tokenizer", "u"), ("template", "d"), ("kv_dtype", "float33"),
    ("exactness", "fast"), ("version", 2), ("seed", b"")])
def test_every_scheme_field_counts(field: str, value: object) -> None:
    other = replace(SCHEME, **{field: value})  # type: ignore[arg-type]
    assert other.digest() != SCHEME.digest()
    assert not set(block_hashes(TOKEN_IDS, other)) & set(PLAIN)


def test_fields_do_not_run_into_each_other() -> None:
    assert replace(SCHEME, model="mw", weights="").digest() != SCHEME.digest()
    assert replace(SCHEME, model="", weights="mw").digest() != replace(SCHEME, model="mw", weights="").digest()


SALTED = ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"abcd", 1)
SALTED_HASH = block_hashes(TOKEN_IDS[:4], SCHEME, (SALTED,))


@pytest.mark.parametrize("byte", range(4))
def test_flipping_any_byte_of_an_extra_key_value(byte: int) -> None:
    value = bytearray(SALTED.value)
    value[byte] ^= 1
    assert block_hashes(TOKEN_IDS[:4], SCHEME, (SALTED._replace(value=bytes(value)),)) != SALTED_HASH


@pytest.mark.parametrize("other", [
    SALTED._replace(kind=ExtraKeyKind.BODY_SALT), SALTED._replace(kind=ExtraKeyKind.LORA), SALTED._replace(start=0),
    SALTED._replace(start=2), SALTED._replace(value=b"abc"), SALTED._replace(value=b"abcd\x00"),
    SALTED._replace(value=b"")])
def test_every_field_of_an_extra_key_counts(other: ExtraKey) -> None:
    assert block_hashes(TOKEN_IDS[:4], SCHEME, (other,)) != SALTED_HASH


def test_one_key_is_not_two_that_spell_the_same_bytes() -> None:
    joined = (ExtraKey(1, b"ab", 0),)
    split = (ExtraKey(1, b"a", 0), ExtraKey(1, b"b", 0))
    assert block_hashes(TOKEN_IDS[:4], SCHEME, joined) != block_hashes(TOKEN_IDS[:4], SCHEME, split)
