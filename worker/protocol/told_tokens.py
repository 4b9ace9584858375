"""Which tokens a stream has told so far, as SSE comments of their own: `: ids CHOICE NUM_EVENTS ID,ID,...`.

Owns: that line, written by a worker before the events that tell the tokens, and read by a gateway that may have to
go on elsewhere. A line counts only when the NUM_EVENTS data events behind it have come too; some tokens have none
(half a character). Must never: reach a client that did not ask a worker for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

TOLD_PREFIX = b": ids "
EVENT_END = b"\n\n"


class ToldTokens(NamedTuple):
    """What one delta of a choice consists of."""

    choice: int
    num_events: int
    token_ids: list[int]


def encode_told(choice: int, num_events: int, token_ids: Iterable[int]) -> bytes:
    """The comment as a block of its own, which every SSE reader skips."""
    ids = ",".join(map(str, token_ids))
    return b"%b%d %d %b%b" % (TOLD_PREFIX, choice, num_events, ids.encode(), EVENT_END)


def decode_told(block: bytes) -> ToldTokens | None:
    """The reverse, without the blank line; None for anything else."""
    if not block.startswith(TOLD_PREFIX):
        return None
    parts = block.removeprefix(TOLD_PREFIX).split(b" ")
    if len(parts) != 3 or not all(part.isdigit() for part in parts[:2]):
        return None
    ids = parts[2].split(b",") if parts[2] else []
    if not all(token.isdigit() for token in ids):
        return None
    return ToldTokens(int(parts[0]), int(parts[1]), list(map(int, ids)))
