"""Tool calls in a text that arrives in pieces: what is text goes on as text, what is a call becomes a value.

Owns one choice's text after detokenising. The result depends on the whole text alone, never on how it was cut. A call
counts only when it is whole, is an object with an object of arguments, and names a tool of the request; whatever else
looks like one stays text, so that nothing the model wrote is lost. White space before and between calls is dropped.
A call is handed out in one piece, when it is complete: its arguments are the model's own characters.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from worker.prompt.json_scanner import ObjectScanner
from worker.prompt.tool_style import ToolStyle

MAX_CALLS = 128
"""Of one choice; what a model writes beyond them is dropped."""
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; `arguments` is the text of a JSON object."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """Text that is safe to send, and the calls that follow it."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class _Phase(Enum):
    TEXT = auto()      # between calls
    BEFORE = auto()    # an object may begin
    OBJECT = auto()    # inside an object
    AFTER = auto()     # behind a call: its closer, or another one


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_call_decoder = msgspec.json.Decoder(_WrittenCall)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ToolCallParser:
    """push() the text as it comes, finish() once at the end."""

    def __init__(self, style: ToolStyle, tool_names: Collection[str], *, max_calls: int = MAX_CALLS) -> None:
        self._style = style
        self._tool_names = frozenset(tool_names)
        self._max_calls = max_calls
        self._phase = _Phase.TEXT
        self._held = ""       # not yet decided
        self._space = ""      # white space that is text only if text follows
        self._opening = ""    # what led to the object at hand, in case it is none
        self._lead_due = False
        self._scanner = ObjectScanner()
        self._scanned = 0
        self._may_be_bare = style.bare
        self._num_calls = 0
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> Parsed:
        """Take more text; returns what is certain now."""
        self._held += text
        while self._step():
            pass
        parsed = Parsed("".join(self._texts), tuple(self._calls))
        self._texts, self._calls = [], []
        return parsed

    def finish(self) -> str:
        """Nothing more comes: what is undecided is text."""
        rest = self._opening + self._held
        if self.has_calls and _begins_any(rest.strip(_SPACE), (self._style.marker, self._style.closer)):
            rest = ""    # the token limit fell into the markup around a call
        text = self._space + rest if rest.strip(_SPACE) or not self.has_calls else ""
        self._opening = self._held = self._space = ""
        return text

    def _step(self) -> bool:
        """Decide one thing about what is held; False when more text is needed for that."""
        if not self._held:
            return False
        match self._phase:
            case _Phase.TEXT:
                return self._in_text()
            case _Phase.BEFORE:
                return self._before_object()
            case _Phase.OBJECT:
                return self._in_object()
            case _Phase.AFTER:
                return self._after_object()

    def _in_text(self) -> bool:
        held, marker = self._held, self._style.marker
        if self._may_be_bare:
            bare = held.lstrip(_SPACE)
            if not bare:
                return False
            if bare[0] == "{":
                self._opening, self._held = held[:len(held) - len(bare)], bare
                self._may_be_bare, self._phase = False, _Phase.BEFORE
                return True
            self._may_be_bare = marker.startswith(bare)    # half a marker decides nothing yet
        start = held.find(marker)
        if start >= 0:
            self._emit(held[:start])
            self._opening, self._space = self._space + marker, ""
            self._held = held[start + len(marker):]
            self._may_be_bare, self._phase, self._lead_due = False, _Phase.BEFORE, bool(self._style.lead)
            return True
        safe = len(held) - _num_open(held, marker)
        self._emit(held[:safe])
        self._held = held[safe:]
        return False

    def _before_object(self) -> bool:
        """Skip white space and, once, the style's lead."""
        first = self._held[0]
        if first == "{":
            self._scanner, self._scanned, self._phase = ObjectScanner(), 0, _Phase.OBJECT
        elif first in _SPACE or (self._lead_due and first == self._style.lead):
            self._lead_due = self._lead_due and first in _SPACE
            self._opening, self._held = self._opening + first, self._held[1:]
        else:
            self._give_up(0)
        return True

    def _in_object(self) -> bool:
        end = self._scanner.end_in(self._held, self._scanned)
        self._scanned = len(self._held)
        if end is None:
            return False
        call = self._read_call(self._held[:end])
        if call is None:
            self._give_up(end)
            return True
        if self._num_calls < self._max_calls:
            self._calls.append(call)
            self._num_calls += 1
        self._opening, self._held, self._phase = "", self._held[end:], _Phase.AFTER
        return True

    def _after_object(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        closer = self._style.closer
        if not rest or (closer and closer.startswith(rest) and rest != closer):
            return False
        if rest[0] in self._style.separators:
            self._opening, self._held, self._phase = rest[0], rest[1:], _Phase.BEFORE
            self._lead_due = False
            return True
        if closer and rest.startswith(closer):
            self._space, rest = "", rest[len(closer):]
            self._held, self._phase = rest, _Phase.TEXT
            return True
        self._phase = _Phase.TEXT
        return True

    def _give_up(self, num_chars: int) -> None:
        """The opening and that much of what follows are text after all."""
        self._emit(self._opening + self._held[:num_chars])
        self._opening, self._held, self._phase = "", self._held[num_chars:], _Phase.TEXT

    def _emit(self, text: str) -> None:
        """Text, whose white space at the end waits for what follows."""
        text = self._space + text
        kept = text.rstrip(_SPACE)
        self._space = text[len(kept):]
        if kept:
            self._texts.append(kept)

    def _read_call(self, text: str) -> ToolCall | None:
        try:
            written = _call_decoder.decode(text)
            raw = written.arguments if written.arguments is not msgspec.UNSET else written.parameters
            arguments = "{}" if raw is msgspec.UNSET else bytes(raw).decode()
            if arguments.startswith('"'):    # some models write the object as a string of JSON
                arguments = msgspec.json.decode(arguments, type=str)
            _object_decoder.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        return ToolCall(self._num_calls, written.name, arguments) if written.name in self._tool_names else None


def _begins_any(text: str, markers: Collection[str]) -> bool:
    return bool(text) and any(marker.startswith(text) for marker in markers)


def _num_open(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
