"""Weights of bytes with which no token of a vocabulary weighs more than 1: a text has the tokens that it weighs.

Owns the choice of weights, each a row: all bytes alike, one byte or one class of bytes alone, and all bytes or all
classes at once, each by how often one token can hold it. A text is weighed with every row and the heaviest counts: a
run of one letter or of spaces is far from other long tokens. Every row is scaled by the heaviest token.
"""

from __future__ import annotations

import string
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

NUM_BYTES = 256
ByteWeights = npt.NDArray[np.float64]
_CLASSES = (b" ", b"\t\n\r\v\f", string.ascii_lowercase.encode(), string.ascii_uppercase.encode(),
            string.digits.encode(), string.punctuation.encode(), bytes(range(0x80, NUM_BYTES)))


def even_weights(bytes_max: int) -> ByteWeights:
    """One row: every byte weighs the same."""
    return np.full((1, NUM_BYTES), 1 / bytes_max)


def weights_of_tokens(tokens: Collection[bytes]) -> ByteWeights:
    """The rows for a vocabulary, which has every byte as a token."""
    listed = [token for token in tokens if token]
    lengths = np.array([len(token) for token in listed])
    flat = np.frombuffer(b"".join(listed), np.uint8)
    starts = np.cumsum(lengths) - lengths

    def scaled(row: ByteWeights) -> ByteWeights:
        return row / float(np.add.reduceat(row[flat], starts).max())

    byte_rows = np.diag(1 / _most_in_one_token(flat, lengths))
    classes = [np.isin(np.arange(NUM_BYTES), list(members)).astype(np.float64) for members in _CLASSES]
    class_rows = np.stack([scaled(row) for row in classes])
    mixed = [scaled(row) for row in (np.ones(NUM_BYTES), byte_rows.sum(axis=0), class_rows.sum(axis=0))]
    return np.vstack([byte_rows, class_rows, *mixed])


def _most_in_one_token(flat: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]) -> ByteWeights:
    """For each byte, how often the token that has it most often has it; 1 for one that none has."""
    pairs, counts = np.unique(np.repeat(np.arange(len(lengths)), lengths) * NUM_BYTES + flat, return_counts=True)
    most = np.ones(NUM_BYTES)
    np.maximum.at(most, pairs % NUM_BYTES, counts.astype(np.float64))
    return most

