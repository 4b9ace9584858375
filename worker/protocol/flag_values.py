"""What a flag may hold, where several commands have one of the kind: numbers, keys, addresses.

Owns the checks and their words. A problem is an ArgumentTypeError, which argparse tells with the flag's name. A key
or a password must never stand in one.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from urllib.parse import urlsplit


def finite_number(text: str) -> float:
    """A number, but not nan or inf."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentTypeError(f"should be a finite number, is {text!r}")
    return value


def bearer_token(text: str) -> str:
    """A key or token without the line break that a file or $(cat) leaves behind it."""
    token = text.strip()
    if not token.isprintable():
        raise ArgumentTypeError("holds a control character, such as a line break, inside: is it one key, and whole?")
    return token


def base_address(text: str) -> str:
    """http://host:port, without the /v1 that clients are given."""
    url = text.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        is_address, parts = False, urlsplit("")
    if "@" in url:
        raise ArgumentTypeError("holds a user name or password, which would stand in reports: give the address "
                                "alone, and a key as --api-key")
    if not is_address or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise ArgumentTypeError(f"{text!r} is not an address: write it as http://host:port")
    return url
