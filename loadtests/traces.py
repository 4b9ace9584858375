"""Request traces: who asked for how much, when, and which blocks of their prompts are equal.

Owns the formats (described in loadtests/README.md) and their detection. What counts for a cache is which blocks
repeat behind which; the text of conversations is kept beside that, for `headstart replay`. It must never draw a
random number that does not come from a seed given to it.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

MOONCAKE_BLOCK = 512
MOONCAKE_STEP_S = 3.0   # its timestamps are rounded to steps of this
TEXT_BLOCK = 16
CHARACTERS_PER_TOKEN = 4
LENGTHS_BLOCK = 16
SESSION_SPREAD_S = 3600.0
ASSISTANT = "assistant"


class TraceError(Exception):
    """The file cannot be read as a trace; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; calls of tools are a part of its text."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids` has an id for each full block of the prompt; equal ids at equal places with equal ids
    before them mean equal prefixes. Of a format with text, `messages` are the prompt and `answer` what was said
    to it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    session: str = ""
    messages: tuple[Message, ...] = field(default=(), compare=False, repr=False)
    answer: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. `format` is what was detected, or the workload's name."""

    name: str
    format: str
    block_size: int
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    def num_distinct_blocks(self) -> int:
        """The footprint: blocks that an infinite cache would hold in the end."""
        return len({(index, block) for request in self.requests for index, block in enumerate(request.block_ids)})

    def head(self, num_requests: int | None) -> Trace:
        """The first requests only."""
        return self if num_requests is None else replace(self, requests=self.requests[:num_requests])

    def with_block_size(self, block_size: int) -> Trace:
        """The same blocks, each of so many tokens: prompts shrink or grow."""
        def scaled(request: TraceRequest) -> TraceRequest:
            own = request.prompt_tokens - len(request.block_ids) * self.block_size
            return replace(request, prompt_tokens=max(1, len(request.block_ids) * block_size
                                                      + own * block_size // self.block_size))
        return replace(self, block_size=block_size, requests=tuple(map(scaled, self.requests)))

    def at_rate(self, requests_per_s: float) -> Trace:
        """The same requests, times scaled so that the mean rate is this."""
        if not self.requests or self.span_s <= 0:
            return self
        first, factor = self.requests[0].at_s, len(self.requests) / requests_per_s / self.span_s
        return replace(self, requests=tuple(replace(request, at_s=(request.at_s - first) * factor)
                                            for request in self.requests))


def load_trace(path: Path, *, seed: int = 0, block_size: int | None = None) -> Trace:
    """Read a .jsonl or .jsonl.gz file of any known format. `block_size` overrides the format's own."""
    reader = _LineReader(path)
    lines = iter(reader)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: the file has no lines")
    detected = detect_format(first)
    if detected is None:
        raise TraceError(f"{path}: line 1 is of no known format: it should have 'timestamp' and 'input_length', "
                         "'requests' with 'runs', 'messages', or 'turns' (see loadtests/README.md)")
    try:
        block, requests = _READERS[detected](_chained(first, lines), random.Random(seed), block_size)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}:{reader.number}: does not fit the format '{detected}': {reason}") from None
    ordered = tuple(sorted(requests, key=lambda request: request.at_s))
    if not ordered:
        raise TraceError(f"{path}: no requests")
    return Trace(path.name.removesuffix(".gz").removesuffix(".jsonl"), detected, block, ordered)


def detect_format(line: dict[str, Any]) -> str | None:
    """Which format a file's first line has; None when none that is known."""
    if "timestamp" in line and "input_length" in line:
        return "mooncake" if "hash_ids" in line else "lengths"
    if isinstance(line.get("requests"), list):
        return "sessions"
    if isinstance(line.get("messages"), list):
        return "conversations"
    return "questions" if isinstance(line.get("turns"), list) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file's lines as objects; TraceError names the line that is none."""
    return iter(_LineReader(path))


class _LineReader:
    """A file's lines as objects, one after the other. `number` is that of the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.number = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        path = self._path
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                for self.number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    value = orjson.loads(line)
                    if not isinstance(value, dict):
                        raise TraceError(f"{path}:{self.number}: each line should be a JSON object")
                    yield value
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{path}:{self.number}: not JSON: {error.msg}") from None
        except (OSError, EOFError) as error:
            raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _chained(first: dict[str, Any], rest: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _read_mooncake(lines: Iterator[dict[str, Any]], draw: random.Random,
                   block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """One request a line. The source rounds times to 3 s, so each is spread over its step at random."""
    requests, block = [], block_size or MOONCAKE_BLOCK
    for line in lines:
        ids = line["hash_ids"]
        # Another block size keeps the ids and shrinks the prompt, for models with a shorter context.
        prompt = max(1, int(line["input_length"]) * block // MOONCAKE_BLOCK)
        requests.append(TraceRequest(line["timestamp"] / 1000 + draw.uniform(0, MOONCAKE_STEP_S), prompt,
                                     max(1, int(line["output_length"])), tuple(ids[:prompt // block])))
    return block, requests


def _read_lengths(lines: Iterator[dict[str, Any]], draw: random.Random,
                  block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """Times and lengths only: nothing is shared, every block has an id of its own."""
    requests, block, next_id = [], block_size or LENGTHS_BLOCK, 0
    for line in lines:
        prompt = max(1, int(line["input_length"]))
        num_blocks = prompt // block
        requests.append(TraceRequest(line["timestamp"] / 1000, prompt, max(1, int(line["output_length"])),
                                     tuple(range(next_id, next_id + num_blocks))))
        next_id += max(1, num_blocks)
    return block, requests


def _read_sessions(lines: Iterator[dict[str, Any]], draw: random.Random,
                   block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """One session a line, ids local to it. Sessions start at random over an hour; their own pauses are kept."""
    requests: list[TraceRequest] = []
    own_block = block_size
    for line in lines:
        source_block = int(line["block_size"])
        block = own_block = own_block or source_block
        starts_at, session = draw.uniform(0, SESSION_SPREAD_S), str(line["id"])
        ids: dict[int, int] = {}
        for at_s, entry in _flat(line["requests"], 0.0):
            local = [first + step for first, count in entry["runs"] for step in range(count)]
            prompt = max(1, int(entry["in"]) * block // source_block)
            full = tuple(ids.setdefault(one, _named(session, one)) for one in local[:prompt // block])
            requests.append(TraceRequest(starts_at + at_s, max(prompt, 1), max(1, int(entry["out"])), full, session))
    return own_block or MOONCAKE_BLOCK, requests


def _flat(entries: list[dict[str, Any]], offset_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """A session's requests with those of its sub-agents put in; theirs count from the marker."""
    for entry in entries:
        if entry.get("type") == "subagent":
            yield from _flat(entry.get("requests", []), offset_s + entry["t"])
        else:
            yield offset_s + entry["t"], entry


def _read_conversations(lines: Iterator[dict[str, Any]], draw: random.Random,
                        block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """Text: every assistant message is one request whose prompt is all that stands before it."""
    requests, block = [], block_size or TEXT_BLOCK
    for number, line in enumerate(lines):
        said: list[Message] = []
        at_s, session = draw.uniform(0, SESSION_SPREAD_S), str(line.get("id", number))
        for message in line["messages"]:
            turn = Message(message["role"], _text_of(message))
            if turn.role == ASSISTANT:
                requests.append(_text_request(said, turn.text, block, at_s=at_s, session=session))
                at_s += draw.expovariate(1 / 10.0)
            said.append(turn)
    return block, requests


def _read_questions(lines: Iterator[dict[str, Any]], draw: random.Random,
                    block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """Benchmark questions of some turns, answers of 200 tokens: the case without a common prefix."""
    requests, block, answer = [], block_size or TEXT_BLOCK, "." * 200 * CHARACTERS_PER_TOKEN
    for number, line in enumerate(lines):
        said: list[Message] = []
        at_s, session = draw.uniform(0, SESSION_SPREAD_S), str(line.get("id", number))
        for turn in line["turns"]:
            said.append(Message("user", str(turn)))
            requests.append(_text_request(said, answer, block, at_s=at_s, session=session))
            said.append(Message(ASSISTANT, answer))
            at_s += draw.expovariate(1 / 10.0)
    return block, requests


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    return (content if isinstance(content, str) else orjson.dumps(content).decode() if content else "") + (
        orjson.dumps(calls, option=orjson.OPT_SORT_KEYS).decode() if calls else "")


def _text_request(said: list[Message], answer: str, block: int, *, at_s: float, session: str) -> TraceRequest:
    """A quarter of a token a character; a block's id is the hash of its characters."""
    prompt = "".join(f"<{message.role}>{message.text}" for message in said)
    width = block * CHARACTERS_PER_TOKEN
    tokens = max(1, len(prompt) // CHARACTERS_PER_TOKEN)
    ids = tuple(_named(prompt[at:at + width], 0) for at in range(0, tokens // block * width, width))
    return TraceRequest(at_s, tokens, max(1, len(answer) // CHARACTERS_PER_TOKEN), ids, session, tuple(said), answer)


def _named(text: str, number: int) -> int:
    return xxh3_64_intdigest(text.encode(), number) >> 33


_READERS = {"mooncake": _read_mooncake, "lengths": _read_lengths, "sessions": _read_sessions,
            "conversations": _read_conversations, "questions": _read_questions}
