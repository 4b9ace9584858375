"""A field of a client's body that the gateway sets.

Owns how: the body is written anew, never appended to. Where a reader took the first of two equal keys and another the
last, the client's would win at one of them.
"""

from __future__ import annotations

import json

from worker.protocol.api_error import invalid_request


def with_field(body: bytes, name: str, value: str | int) -> bytes:
    """The body with this value of the field instead of its own. ApiError 400 for a number that is none in JSON."""
    # The standard library keeps every number and lone surrogate as it was; faster ones round or refuse them.
    try:
        document = json.loads(body)
        document[name] = value
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise invalid_request("The request body holds a number that cannot be passed on.", None) from None
