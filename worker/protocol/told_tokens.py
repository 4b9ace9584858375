"""Which tokens an answer consists of, for a gateway that asked: of a stream in comments, of a whole answer behind it.

Owns: the comment `: ids CHOICE NUM_EVENTS ID,ID,...`, written by a worker before the events that tell the tokens. A
line counts only when the NUM_EVENTS data events behind it have come too; some tokens have none (half a character).
And the ids of a whole answer's choices, as u32 behind its JSON, with a header that says where they begin.
Must never: reach a client that did not ask a worker for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from worker.protocol.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens

TOLD_PREFIX = b": ids "
EVENT_END = b"\n\n"
BEHIND_HEADER = "x-headstart-ids-behind"
BEHIND_MAX_BYTES = 1024 * 1024  # an answer larger than this is not told: it may pass in parts


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


def tell_behind(body: bytes, choices: Sequence[Sequence[int]]) -> tuple[dict[str, str], bytes]:
    """Headers, and the body with each choice's ids behind it; neither for a body that is too large."""
    if len(body) > BEHIND_MAX_BYTES:
        return {}, body
    lengths = ",".join([str(len(token_ids)) for token_ids in choices])
    return {BEHIND_HEADER: f"{len(body)} {lengths}"}, b"".join([body, *map(pack_tokens, choices)])


def told_behind(headers: Mapping[str, str], body: bytes) -> tuple[bytes, list[list[int]]]:
    """The reverse: the body alone, and the ids, none when they were not told. ValueError when they do not fit."""
    given = headers.get(BEHIND_HEADER)
    if given is None:
        return body, []
    size, _, lengths = given.partition(" ")
    at, choices = int(size), list[list[int]]()
    view = memoryview(body)
    for length in map(int, lengths.split(",")):
        choices.append(unpack_tokens(view[at:at + length * TOKEN_BYTES]))
        at += length * TOKEN_BYTES
    if at != len(body):
        raise ValueError(f"{BEHIND_HEADER}: {given[:64]!r} does not fit a body of {len(body)} bytes")
    return body[:int(size)], choices
