"""The head of a message that we send: one place that turns headers into bytes.

Must never: let a name or value end its line, whoever it came from.
"""

from __future__ import annotations

from collections.abc import Collection


def head_bytes(beginning: str, headers: Collection[tuple[str, str]]) -> bytes:
    """`beginning` (a start line, or several lines of ours), the headers, the blank line. ValueError if one breaks."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    # One line break more than we wrote would be somebody else's header.
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a line break inside a header")
    return f"{beginning}\r\n{lines}\r\n".encode("utf-8", "surrogateescape")
