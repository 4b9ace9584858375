"""Randomness as a function: the same (seed, choice, output index) gives the same number, whatever else is going on.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): counter in, bits out, no state.
That is what lets a generation move to another worker and go on as if nothing had happened. Changing a bit here
changes every seeded answer.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, output_index: int) -> float:
    """A float in [0, 1) with 53 random bits. Seeds equal modulo 2**64 are the same seed."""
    key = (seed & _WORD, seed >> 32 & _WORD)
    high, low, _, _ = philox4x32((output_index & _WORD, output_index >> 32 & _WORD, choice & _WORD, 0), key)
    return ((high << 32 | low) >> 11) * 2.0 ** -53
