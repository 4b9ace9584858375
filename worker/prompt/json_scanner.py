"""Finds where a JSON object ends in a text that arrives in pieces. Pure; looks at brackets and strings only.

What it finds may still be no JSON: whoever decodes it will see.
"""

from __future__ import annotations

import re

_MARKS = re.compile(r'[{}\[\]"]')
_STRING_MARKS = re.compile(r'["\\]')


class ObjectScanner:
    """For one object whose first character is the first one given. Every character is looked at once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skip = 0    # characters behind a backslash that may still have to come

    def end_in(self, text: str, start: int) -> int | None:
        """The index behind the object's last bracket, or None when `text`, new from `start` on, does not hold it."""
        at = start + self._skip
        self._skip = 0
        while (found := (_STRING_MARKS if self._in_string else _MARKS).search(text, at)) is not None:
            at = found.end()
            match found.group():
                case "\\":
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        self._skip = max(0, at - len(text))
        return None
