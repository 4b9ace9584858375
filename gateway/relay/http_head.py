"""The head of a message that we send: one place that turns headers into bytes.

Must never: let a name or value end its line, whoever it came from.
"""

from __future__ import annotations

from collections.abc import Collection


def head_bytes(beginning: str, headers: Collection[tuple[str, str]]) -> bytes:
    """`beginning` (a start line, or several lines), the headers, the blank line. ValueError if a line breaks."""
    head = "\r\n".join([beginning, *[f"{name}: {value}" for name, value in headers]])
    num_breaks = beginning.count("\r\n") + len(headers)
    # One line break more than we wrote would be somebody else's header.
    if head.count("\n") != num_breaks or head.count("\r") != num_breaks:
        raise ValueError("a line break inside a header")
    return f"{head}\r\n\r\n".encode("utf-8", "surrogateescape")
