"""Bytes to a checked JSON object: UTF-8, one object, no duplicate top-level keys, bounded depth and number of parts.

Owns what every JSON body must satisfy whatever its schema. Knows no field names.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import msgspec

from worker.protocol.api_error import ApiError, invalid_request

MAX_JSON_DEPTH = 64
"""How deep arrays and objects may nest; a tool's JSON schema needs about 15."""
MAX_JSON_CONTAINERS = 200_000
"""Arrays and objects in one body: 10,000 messages with parts need 30,000, and millions take seconds to build."""
MAX_JSON_KEYS = 400_000
"""Keys of all objects in one body, two to a container."""
MAX_TOP_LEVEL_KEYS = 1000
"""Of a body; clients know fewer than 100. They are walked one by one where white space lies between."""

_KEY = re.compile(rb'[\s,]*"([^"\\]*(?:\\.[^"\\]*)*)"\s*:\s*')
_CLOSE = re.compile(rb"\s*\}")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS_OR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))
_NO_COLONS_OR_QUOTES = bytes(set(range(256)) - set(b':"'))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PATH = re.compile(r"(?s)^(.*) - at `\$\.?(.*)`$")
_AT_BYTE = re.compile(r"\(byte (\d+)\)$")
_LONE_SURROGATE = re.compile(rb"(?s)(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u])")
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_UNKNOWN = re.compile(r"(?s)^Object contains unknown field `(.*)`$")

_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)


class Body(NamedTuple, Generic[T]):
    """A decoded body and the top-level keys that its schema does not know."""

    value: T
    unknown: tuple[str, ...]


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> Body[T]:
    """Decode with a struct decoder; ApiError 400 whose param is the path of the first offence."""
    if not body.isascii():
        _check_utf8(body)
    _check_num_keys(body)
    try:
        keys = top_level_keys(body)
        check_nesting(body)
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError as error:
        raise _explain_syntax(body, str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    known = _field_names(type(value))
    return Body(value, tuple([key for key in keys if key not in known]))


@cache
def _field_names(struct: type) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct))


def top_level_keys(body: bytes) -> list[str]:
    """The keys of the object in order; ApiError 400 (param = the key) when one occurs twice.

    The decoder keeps the last of two equal keys, so the text is walked beside its result: where every value is the
    one the decoder kept, no key came twice. This costs one comparison per top-level field, not one per byte.
    """
    kept = _raw_decoder.decode(body)
    if len(kept) > MAX_TOP_LEVEL_KEYS:
        raise invalid_request(f"The request body holds more than {MAX_TOP_LEVEL_KEYS} fields.", None)
    # A key and its value take four more characters, and the object one: where this adds up to the body, there is
    # neither white space nor an escape in a key nor anything that was not kept.
    if sum(map(len, kept)) + len(b"".join(kept.values())) + 4 * len(kept) + 1 == len(body):
        return list(kept)
    position = body.index(b"{") + 1
    seen: dict[str, None] = {}
    key = ""
    while (match := _KEY.match(body, position)) is not None:
        key = str(msgspec.json.decode(b'"' + match[1] + b'"', type=str))
        raw = kept[key]
        if key in seen or not body.startswith(raw, match.end()):
            raise _duplicate(key)
        seen[key] = None
        position = match.end() + _num_bytes(raw)
    if _CLOSE.match(body, position) is None:
        # The value kept for this key is a prefix of the one it was compared with: 1 of {"a": 12, "a": 1}.
        raise _duplicate(key)
    return list(seen)


def _num_bytes(raw: msgspec.Raw) -> int:
    return len(memoryview(raw))


def check_nesting(body: bytes) -> None:
    """ApiError 400 when arrays and objects nest deeper than MAX_JSON_DEPTH or are more than MAX_JSON_CONTAINERS.

    `body` must be valid JSON. Works on the text, where a level costs one pass in C: only the brackets outside of
    strings are left, and every pass removes the innermost pairs.
    """
    if opens_at_most(body, MAX_JSON_DEPTH):
        return
    brackets = _outside_of_strings(body, _NO_BRACKETS_OR_QUOTES, 2 * MAX_JSON_CONTAINERS)
    if brackets is None or len(brackets) > 2 * MAX_JSON_CONTAINERS:
        raise invalid_request(f"The request body holds more than {MAX_JSON_CONTAINERS} arrays and objects.", None)
    brackets = brackets.translate(_ONE_KIND)
    for _ in range(MAX_JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _too_deep()


def _check_num_keys(body: bytes) -> None:
    """ApiError 400 when there are more than MAX_JSON_KEYS colons outside of strings, before anything is built."""
    if len(body) <= MAX_JSON_KEYS or body.count(b":") <= MAX_JSON_KEYS:
        return
    colons = _outside_of_strings(body, _NO_COLONS_OR_QUOTES, MAX_JSON_KEYS)
    if colons is None or len(colons) > MAX_JSON_KEYS:
        raise invalid_request(f"The request body holds more than {MAX_JSON_KEYS} keys.", None)


def _outside_of_strings(body: bytes, unwanted: bytes, limit: int) -> bytes | None:
    """The bytes outside of strings that are not `unwanted`; None where they are surely more than `limit`.

    A handful of passes in C whatever the body holds, since the event loop waits for them: a byte is inside a string
    when the quotes before it are odd in number, so quotes that come to lie side by side may go two by two. What is
    then left between two strings is never empty, which bounds how many pieces there are to cut.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = body.translate(None, unwanted).replace(b'""', b"")
    if kept.count(b'"') > 2 * limit + 2:
        return None
    return b"".join(kept.split(b'"')[::2])


def opens_at_most(body: bytes, limit: int) -> bool:
    """Whether there are few opening brackets, in strings or not. Jumping to each is quicker than counting bytes."""
    left = limit
    for bracket in (b"[", b"{"):
        at = body.find(bracket)
        while at >= 0:
            left -= 1
            if left < 0:
                return False
            at = body.find(bracket, at + 1)
    return True


def _check_utf8(body: bytes) -> None:
    # The decoder skips unknown fields without looking at their bytes, and they may be logged or forwarded.
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid_request(f"The request body is not valid UTF-8 (byte {error.start}).", None) from None


def _explain(complaint: str) -> ApiError:
    match = _PATH.match(complaint)
    reason, path = (match[1], match[2].replace("[...]", "")) if match else (complaint, "")
    missing = _MISSING.match(reason)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return invalid_request(f"Missing required field: {param}.", param)
    unknown = _UNKNOWN.match(reason)
    if unknown:
        param = f"{path}.{unknown[1]}" if path else unknown[1]
        return invalid_request(f"Unknown field: {param}.", param)
    if not path:
        return invalid_request(f"The request body must be a JSON object: {reason}.", None)
    return invalid_request(f"Invalid value for {path}: {reason}.", path)


def _explain_syntax(body: bytes, complaint: str) -> ApiError:
    place = _AT_BYTE.search(complaint)
    if place is not None and body.startswith((b"NaN", b"Infinity"), int(place[1])):
        key = _open_field(body[:int(place[1])].removesuffix(b"-"))
        if key is not None:
            return invalid_request(f"Invalid value for {key}: NaN and Infinity are not JSON.", key)
    if complaint.endswith("truncated") and _LONE_SURROGATE.search(body):
        complaint = "a string holds one half of a surrogate pair, a \\ud800 to \\udbff without its \\udc00 to \\udfff"
    return invalid_request(f"The request body is not valid JSON: {complaint}.", None)


def _open_field(start: bytes) -> str | None:
    """The top-level key whose value is under way where `start`, the beginning of an object, breaks off."""
    brackets = _STRING.sub(b"", start).translate(None, _NO_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if not brackets.startswith(b"{") or len(brackets) > MAX_JSON_DEPTH:
        return None
    try:
        return top_level_keys(start + b"0" + brackets[::-1].translate(bytes.maketrans(b"[{", b"]}")))[-1]
    except msgspec.MsgspecError:
        return None


def _duplicate(key: str) -> ApiError:
    return invalid_request(f"The key {key!r} occurs twice in the request body.", key)


def _too_deep() -> ApiError:
    return invalid_request(f"The request body nests deeper than {MAX_JSON_DEPTH} arrays and objects.", None)
