"""Chat bodies that differ from an earlier one in nothing but their messages, as most of a client's do.

Owns: what those earlier ones said beside their messages, by the very bytes, REMEMBERED of them at most. Must never:
judge by itself: whatever is new, long, oddly written or wrong is for parse_chat() to say, and what that has said of
the same bytes before it would say again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from worker.prompt.json_body import MAX_JSON_DEPTH, MAX_JSON_KEYS, opens_at_most
from worker.prompt.messages import are_plain, check_messages
from worker.prompt.requests import ChatRequest, parse_chat

REMEMBERED = 512
REST_MAX_BYTES = 512

raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_said: dict[tuple[tuple[str, ...], bytes], ChatRequest] = {}


def parse_usual_chat(body: bytes) -> ChatRequest:
    """parse_chat(), in half the time for such a body."""
    if len(body) > MAX_JSON_KEYS and body.count(b":") > MAX_JSON_KEYS:
        return parse_chat(body)
    try:
        kept = raw_decoder.decode(body)
        messages = kept.pop("messages")
    except (msgspec.MsgspecError, KeyError, RecursionError):
        return parse_chat(body)
    names, rest = tuple(kept), b",".join(kept.values())
    # As in top_level_keys(): where the lengths add up no key came twice. Beside keys, values and the object's braces
    # there are four characters a key, one of which stands in `rest` already, but for the last.
    num_bytes = sum(map(len, names)) + len(rest) + 3 * len(names) + len(memoryview(messages)) + len('"messages":,{}')
    is_usual = len(rest) <= REST_MAX_BYTES and names and num_bytes == len(body)
    if not is_usual:
        return parse_chat(body)
    said = _said.get((names, rest))
    if said is None:
        return _remember((names, rest), parse_chat(body))
    try:
        decoded = messages_decoder.decode(messages)
    except (msgspec.MsgspecError, RecursionError):
        return parse_chat(body)
    if not are_plain(decoded):
        if not opens_at_most(body, MAX_JSON_DEPTH):
            return parse_chat(body)
        check_messages(decoded)
    return msgspec.structs.replace(said, messages=tuple(decoded))


def said_beside_messages(names: tuple[str, ...], values: Iterable[bytes]) -> ChatRequest | None:
    """What fields of these names and values say beside messages, if that is remembered."""
    return _said.get((names, b",".join(values)))


def _remember(key: tuple[tuple[str, ...], bytes], request: ChatRequest) -> ChatRequest:
    # Tools and arguments of templates are dicts, which requests should not share.
    if request.tools is None and not request.chat_template_kwargs:
        if len(_said) >= REMEMBERED:
            _said.clear()
        _said[key] = msgspec.structs.replace(request, messages=())
    return request
