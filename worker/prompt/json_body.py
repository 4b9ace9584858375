"""Bytes to a checked JSON object: UTF-8, one object, no duplicate top-level keys, bounded depth.

Owns what every JSON body must satisfy whatever its schema. Knows no field names.
"""

from __future__ import annotations

import re
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from worker.protocol.api_error import ApiError, invalid_request

MAX_JSON_DEPTH = 64
"""Nested arrays and objects a body may hold; a tool's JSON schema needs about 15."""

_KEY = re.compile(rb'[\s,]*"([^"\\]*(?:\\.[^"\\]*)*)"\s*:\s*')
_CLOSE = re.compile(rb"\s*\}")
_PATH = re.compile(r"(?s)^(.*) - at `\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*)`$")

T = TypeVar("T")


class Body(NamedTuple, Generic[T]):
    """A decoded body and the top-level keys that its schema does not know."""

    value: T
    unknown: tuple[str, ...]


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> Body[T]:
    """Decode with a struct decoder; ApiError 400 whose param is the path of the first offence."""
    _check_utf8(body)
    try:
        keys = top_level_keys(body)
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError as error:
        raise invalid_request(f"The request body is not valid JSON: {error}.", None) from None
    except RecursionError:
        raise _too_deep() from None
    check_depth(body, value)
    known = {field.encode_name for field in msgspec.structs.fields(type(value))}  # type: ignore[arg-type]
    return Body(value, tuple(key for key in keys if key not in known))


def top_level_keys(body: bytes) -> list[str]:
    """The keys of the object in order; ApiError 400 (param = the key) when one occurs twice.

    The decoder keeps the last of two equal keys, so the text is walked beside its result: where every value is the
    one the decoder kept, no key came twice. This costs one comparison per top-level field, not one per byte.
    """
    kept = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    position = body.index(b"{") + 1
    seen: dict[str, None] = {}
    key = ""
    while (match := _KEY.match(body, position)) is not None:
        key = str(msgspec.json.decode(b'"' + match[1] + b'"', type=str))
        raw = kept[key]
        if key in seen or not body.startswith(raw, match.end()):
            raise _duplicate(key)
        seen[key] = None
        position = match.end() + len(memoryview(raw))
    if _CLOSE.match(body, position) is None:
        # The value kept for this key is a prefix of the one it was compared with: 1 of {"a": 12, "a": 1}.
        raise _duplicate(key)
    return list(seen)


def check_depth(body: bytes, value: object) -> None:
    """ApiError 400 when arrays and objects nest deeper than MAX_JSON_DEPTH."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return
    raise _too_deep()


def _containers(value: Any) -> list[Any]:
    if isinstance(value, msgspec.Struct):
        children: Any = [getattr(value, name) for name in value.__struct_fields__]
    else:
        children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list | msgspec.Struct)]


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
    if not path:
        return invalid_request(f"The request body must be a JSON object: {reason}.", None)
    return invalid_request(f"Invalid value for {path}: {reason}.", path)


def _duplicate(key: str) -> ApiError:
    return invalid_request(f"The key {key!r} occurs twice in the request body.", key)


def _too_deep() -> ApiError:
    return invalid_request(f"The request body nests deeper than {MAX_JSON_DEPTH} arrays and objects.", None)
