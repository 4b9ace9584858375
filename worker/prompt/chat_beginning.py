"""The beginning of chat bodies that go on in different ways: all up to the end of some message, understood once.

Owns: what such a beginning says, and what a body says that goes on from it (sans-I/O). Must never: judge what is
behind: whatever is new there in kind, oddly written or wrong is for parse_usual_chat() to say about the whole.

A body is {"...":...,"messages":[message,message | ,message],"...":...}, cut at the |. Behind the cut a JSON reader is
in the array `messages` of the outermost object whatever the messages were, so '{"messages":[' in place of what is in
front leads to the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from worker.prompt.json_body import MAX_JSON_DEPTH, opens_at_most
from worker.prompt.messages import MAX_MESSAGES, check_messages
from worker.prompt.requests import ChatRequest
from worker.prompt.usual_chat import messages_decoder, raw_decoder, said_beside_messages
from worker.protocol.api_error import ApiError

CUTS_MAX = 6    # looked at in one body
_FIELD = b'"messages":['
_OPENING = b'{"messages":['
_END, _BORDER = b"}]", b'},{"role":'
_DEPTH_INSIDE = 2   # the outermost object and its array


class ChatBeginning(msgspec.Struct, frozen=True):
    """`names` and `values` are those of the fields in front of the messages. Nobody changes the messages."""

    body: bytes
    names: tuple[str, ...]
    values: tuple[bytes, ...]
    messages: tuple[dict[str, Any], ...]


def last_end(body: bytes) -> int:
    """Where the last message may end; beginning_of() knows whether it does."""
    return body.rfind(_END) + 1


def ends_before(body: bytes, end: int) -> Iterator[int]:
    """Where messages may end before that, the last place first, CUTS_MAX at most."""
    for _ in range(CUTS_MAX):
        at = body.rfind(_BORDER, 0, end)
        if at < 0:
            return
        end = at + 1
        yield end


def beginning_of(body: bytes, end: int) -> ChatBeginning | None:
    """The beginning of a body that has been found right by the parser; None where no message ends at `end`."""
    at = body.find(_FIELD)
    if at < 0 or end <= at + len(_FIELD):
        return None
    head = body[:at] + b'"messages":0}'
    try:
        kept = raw_decoder.decode(head)
        messages = messages_decoder.decode(body[at + len(_FIELD) - 1:end] + b"]")
    except (msgspec.MsgspecError, RecursionError):
        return None     # `messages` inside of something, or a cut inside of a message
    # No white space, no escapes in names, no name twice: see top_level_keys().
    if "messages" not in kept or _num_bytes(kept) != len(head):
        return None
    del kept["messages"]
    return ChatBeginning(body[:end], tuple(kept), tuple(map(bytes, kept.values())), tuple(messages))


def parse_behind(beginning: ChatBeginning, body: bytes) -> ChatRequest | None:
    """parse_usual_chat() of a body that begins so; None leaves it to that."""
    behind = body[len(beginning.body):]
    if not behind.startswith(b",{") or not opens_at_most(behind, MAX_JSON_DEPTH - _DEPTH_INSIDE):
        return None
    rest = _OPENING + behind[1:]
    try:
        kept = raw_decoder.decode(rest)
        if _num_bytes(kept) != len(rest) or any(name in kept for name in beginning.names):
            return None
        messages = messages_decoder.decode(kept.pop("messages"))
        check_messages(messages)
    except (msgspec.MsgspecError, KeyError, RecursionError, ApiError):
        return None
    said = said_beside_messages((*beginning.names, *kept), (*beginning.values, *kept.values()))
    if said is None or len(beginning.messages) + len(messages) > MAX_MESSAGES:
        return None
    return msgspec.structs.replace(said, messages=(*beginning.messages, *messages))


def _num_bytes(kept: dict[str, msgspec.Raw]) -> int:
    """Of the object that holds these, plainly written."""
    return sum(map(len, kept)) + len(b"".join(kept.values())) + 4 * len(kept) + 1
