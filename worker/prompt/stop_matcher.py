"""Finds stop strings in a text that arrives in pieces, and holds back only what could still become one.

The stop that is complete first wins; of two that end together, the longer. So the result depends on the text alone,
never on how it was cut. Pure.
"""

from __future__ import annotations

from typing import NamedTuple


class Matched(NamedTuple):
    """Text that is safe to send. `stopped`: a stop string, `stop`, follows it; nothing after it counts."""

    text: str
    stopped: bool
    stop: str | None = None


class StopMatcher:
    """Holds at most one character less than the longest stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> Matched:
        """Take more text; returns what is safe now."""
        if not text:
            return Matched("", False)
        if not self._held and self._first_chars.isdisjoint(text):
            return Matched(text, False)  # nearly every token
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            end, start = min(ends)
            return Matched(text[:start], True, text[start:end])
        safe = len(text) - self._num_open(text)
        self._held = text[safe:]
        return Matched(text[:safe], False)

    def finish(self) -> str:
        """The text still held: no stop string came."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        num_open = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < len(text) - num_open:
                if stop.startswith(text[start:]):
                    num_open = len(text) - start
                    break  # this stop's later starts are shorter
                start = text.find(stop[0], start + 1)
        return num_open
