"""The words between a supervisor and one of its processes: numbered questions and answers on a stream socket.

A frame is its payload's length, what it is, and the question's number. Each side may ask; answers carry the number.
"""

from __future__ import annotations

import struct
from enum import IntEnum

HEAD = struct.Struct("<IBI")
PAYLOAD_MAX_BYTES = 64 * 1024 * 1024


class Word(IntEnum):
    """`yours`: your own metrics, please. `whole`: those of the gateway, please. `change`: have every process add or
    remove a worker. `fleet`: what has been added and removed so far. The answers have an `is` behind."""

    YOURS = 1
    YOURS_IS = 2
    WHOLE = 3
    WHOLE_IS = 4
    CHANGE = 5
    CHANGE_IS = 6
    FLEET = 7
    FLEET_IS = 8


def frame(word: Word, number: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(len(payload), word, number) + payload


def read_head(head: bytes) -> tuple[int, Word, int]:
    """(payload bytes, word, number); ValueError for what is no head."""
    num_bytes, word, number = HEAD.unpack(head)
    if num_bytes > PAYLOAD_MAX_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes")
    return num_bytes, Word(word), number
