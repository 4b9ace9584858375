"""What a stream has told its client so far, for the case that another worker has to go on with it (sans-I/O).

Owns: which bytes of a headstart worker's stream pass (whole events; its comments about token ids do not), the raw
bytes up to KEPT_BYTES, and their meaning once it is needed. Must never: parse an event while all is well, or count
tokens whose events the client does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from worker.protocol.told_tokens import EVENT_END, TOLD_PREFIX, ToldTokens, decode_told

KEPT_BYTES = 1024 * 1024
DONE_EVENT = b"data: [DONE]"
_DATA = b"data: "
_ERROR_EVENT = b'data: {"error"'
_TOLD_LATER = EVENT_END + TOLD_PREFIX
_THREE_ENDS = b"\n\n\n"  # which two of them end an event depends on where it began
# The worker's own troubles: another worker's chance, and nothing for the client to see. Other errors are for it.
_LOST_CODES = ("worker_failed", "worker_draining", "internal_error")
_HEAD = ("id", "object", "created", "model", "system_fingerprint")


class WholeEvents:
    """Bytes in, whole blocks out (without their blank lines). `lost`: the worker has said that it gives up, and what
    comes behind that is nobody's. `refused`: it has told the client why it ends, so nobody can go on.
    """

    __slots__ = ("held", "lost", "refused")

    def __init__(self) -> None:
        self.held = b""
        self.lost = self.refused = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The blocks that are complete now; `held` is the beginning of the next."""
        *blocks, self.held = (self.held + chunk if self.held else chunk).split(EVENT_END)
        for number, block in enumerate(blocks):
            if block.startswith(_ERROR_EVENT):
                if _error_code(block) in _LOST_CODES:
                    self.lost = True
                    return blocks[:number]
                self.refused = True
        return blocks


class Transcript:
    """feed() every chunk; what it returns may go to the client. `is_kept`: it is short enough to be understood."""

    __slots__ = ("_events", "_is_mid_event", "_kept", "_kept_bytes", "is_kept")

    def __init__(self) -> None:
        self._events = WholeEvents()
        self._is_mid_event = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.is_kept = True

    @property
    def lost(self) -> bool:
        """See WholeEvents."""
        return self._events.lost

    @property
    def refused(self) -> bool:
        """See WholeEvents."""
        return self._events.refused

    def feed(self, chunk: bytes) -> bytes:
        """Whole events, without comments about tokens; b"" when there is none yet."""
        self.keep(chunk)
        blocks = self._events.feed(chunk)
        passing = []
        for block in blocks:
            if not block.startswith(TOLD_PREFIX) or self._is_mid_event:
                passing.append(block)
                self._is_mid_event = False
        if passing:
            passing.append(b"")
        data = EVENT_END.join(passing)
        if len(self._events.held) > KEPT_BYTES:  # an event that large passes in parts, and cannot be gone on from
            data, self._events.held, self._is_mid_event = data + self._events.held, b"", True
            self._forget()
        return data

    def passing_whole(self, chunk: bytes) -> bytes | None:
        """What feed() would return for a chunk of whole events, neither of which ends the stream; None for any other.
        It is not fed yet: keep() does that."""
        if self._events.held or self._is_mid_event or not chunk.endswith(EVENT_END) or chunk.endswith(_THREE_ENDS):
            return None
        if _ERROR_EVENT in chunk:
            return None
        if not chunk.startswith(TOLD_PREFIX):
            return chunk if _TOLD_LATER not in chunk else _without_told(chunk)
        rest = chunk[chunk.index(EVENT_END) + len(EVENT_END):]
        return _without_told(rest) if rest.startswith(TOLD_PREFIX) or _TOLD_LATER in rest else rest

    def keep(self, chunk: bytes) -> None:
        """Remember what came, as it came."""
        if self.is_kept:
            self._kept.append(chunk)
            self._kept_bytes += len(chunk)
            if self._kept_bytes > KEPT_BYTES:
                self._forget()

    def kept_blocks(self) -> list[bytes]:
        """Everything up to the last event's end, comments included. Only while `is_kept`."""
        return WholeEvents().feed(b"".join(self._kept))

    def _forget(self) -> None:
        self.is_kept = False
        self._kept = []


def _without_told(events: bytes) -> bytes:
    blocks = events.split(EVENT_END)[:-1]
    return b"".join([block + EVENT_END for block in blocks if not block.startswith(TOLD_PREFIX)])


def _error_code(block: bytes) -> object:
    try:
        return orjson.loads(block.removeprefix(_DATA))["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


@dataclass(slots=True)
class ChoiceTold:
    """What the client has of one choice: characters, the chunk with its role, its end; and the ids they came from."""

    token_ids: list[int] = field(default_factory=list)
    sent_chars: int = 0
    has_role: bool = False
    is_finished: bool = False


class Told:
    """A stream understood, block by block, also over several workers. `head` is what every chunk carries."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [ChoiceTold() for _ in range(num_choices)]
        self.head: dict[str, Any] | None = None
        self.refused = False
        self._has_usage = self._saw_usage = False
        self._pending: dict[int, ToldTokens] = {}

    @property
    def unfinished(self) -> list[int]:
        """Choices that the client still waits for."""
        return [index for index, choice in enumerate(self.choices) if not choice.is_finished]

    @property
    def num_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def replay(self, blocks: Iterable[bytes]) -> None:
        """What has gone to the client. ValueError as in take()."""
        for block in blocks:
            self.take(block)
        self._has_usage = self._saw_usage
        self._pending.clear()

    def worker_lost(self, choice: int | None) -> None:
        """Tokens whose events did not come are another worker's to generate again; None: of any choice."""
        if choice is None:
            self._pending.clear()
        else:
            self._pending.pop(choice, None)

    def take(self, block: bytes) -> bool:
        """Understand one block (without its blank line): does it belong to a choice's answer? ValueError when it is
        none that a headstart worker writes."""
        try:
            told = decode_told(block)
            if told is not None:
                self._pending[told.choice] = told
                self._count_events(told.choice, 0)
            if block == DONE_EVENT or not block or block.startswith(b":"):
                return False
            if not block.startswith(_DATA):
                raise ValueError("an event of another kind")
            chunk = orjson.loads(block.removeprefix(_DATA))
            if "error" in chunk:
                self.refused = True
                return True
            return self._take_chunk(chunk)
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a chunk of a headstart worker: {error!r}") from error

    def _take_chunk(self, chunk: dict[str, Any]) -> bool:
        if self.head is None:
            self.head = {name: chunk[name] for name in _HEAD}
        if not chunk["choices"]:
            self._saw_usage = True
            return False
        for item in chunk["choices"]:
            choice, delta = self.choices[item["index"]], item.get("delta") or {}
            choice.sent_chars += len(item.get("text") or delta.get("content") or "")
            choice.has_role = choice.has_role or "role" in delta
            choice.is_finished = choice.is_finished or item["finish_reason"] is not None
            self._count_events(item["index"], 1)
        return True

    def _count_events(self, choice: int, num_events: int) -> None:
        told = self._pending.pop(choice, None)
        if told is None:
            return
        left = told.num_events - num_events
        if left > 0:
            self._pending[choice] = told._replace(num_events=left)
        else:
            self.choices[choice].token_ids += told.token_ids

    def ending(self, *, prompt_tokens: int, cached_tokens: int, include_usage: bool) -> bytes:
        """The end of the stream, as the worker would have written it."""
        assert self.head is not None, "an answer that ended began"
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.num_tokens,
                 "total_tokens": prompt_tokens + self.num_tokens,
                 "prompt_tokens_details": {"cached_tokens": cached_tokens}}
        chunk = _DATA + orjson.dumps({**self.head, "choices": [], "usage": usage}) + EVENT_END
        return (chunk if include_usage and not self._has_usage else b"") + DONE_EVENT + EVENT_END
