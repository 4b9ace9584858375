"""Request traces: who asked for how much, when, and which blocks of their prompts are equal.

Owns the formats (described in loadtests/README.md) and their detection. What counts for a cache is which blocks
repeat behind which; the text of conversations is kept beside that, for `headstart replay`. It must never draw a
random number that does not come from a seed given to it.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from loadtests.trace_fields import (
    BLOCK_SIZE_MAX,
    OUTPUT_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    SUBAGENTS_DEEP_MAX,
    block_ids,
    block_runs,
    listed,
    objects,
    offset_s,
    output_tokens,
    prompt_tokens,
    refuse,
    scaled_prompt,
    text,
    whole,
    within_span,
)

MOONCAKE_BLOCK = 512
MOONCAKE_STEP_S = 3.0   # its timestamps are rounded to steps of this
TEXT_BLOCK = 16
CHARACTERS_PER_TOKEN = 4
LENGTHS_BLOCK = 16
SESSION_SPREAD_S = 3600.0
ASSISTANT = "assistant"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"


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
        return len({block for chain in self.chains() for block in chain})

    def chains(self) -> list[tuple[int, ...]]:
        """For each request its blocks by numbers that are equal only behind equal blocks."""
        numbers: dict[tuple[int, int], int] = {}
        chains = []
        for request in self.requests:
            parent, chain = 0, []
            for block_id in request.block_ids:
                parent = numbers.setdefault((parent, block_id), len(numbers) + 1)
                chain.append(parent)
            chains.append(tuple(chain))
        return chains

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
    except (KeyError, ValueError) as error:
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
                    yield from self._parsed(line.removeprefix(BYTE_ORDER_MARK) if self.number == 1 else line)
        except gzip.BadGzipFile:
            raise TraceError(f"{path}: is not compressed by gzip: name it .jsonl, or compress it") from None
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{path}:{self.number}: not JSON: {error.msg}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    def _parsed(self, line: bytes) -> Iterator[dict[str, Any]]:
        """Of an empty line nothing."""
        if self.number == 1 and line.startswith(GZIP_MAGIC):
            raise TraceError(f"{self._path}: is compressed by gzip: name it .jsonl.gz")
        if line.strip():
            value = orjson.loads(line)
            if not isinstance(value, dict):
                raise TraceError(f"{self._path}:{self.number}: each line should be a JSON object")
            yield value


def _chained(first: dict[str, Any], rest: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _read_mooncake(lines: Iterator[dict[str, Any]], draw: random.Random,
                   block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """One request a line. The source rounds times to 3 s, so each is spread over its step at random."""
    requests: list[TraceRequest] = []
    block, first_s = block_size or MOONCAKE_BLOCK, None
    for line in lines:
        at_s = within_span(line, "timestamp", first_s, 1000)
        first_s = at_s if first_s is None else first_s
        length = prompt_tokens(line, "input_length")
        ids = block_ids(line, "hash_ids", length, MOONCAKE_BLOCK)
        prompt = scaled_prompt(length, MOONCAKE_BLOCK, block)
        requests.append(TraceRequest(at_s + draw.uniform(0, MOONCAKE_STEP_S), prompt,
                                     output_tokens(line, "output_length"), tuple(ids[:prompt // block])))
    return block, requests


def _read_lengths(lines: Iterator[dict[str, Any]], draw: random.Random,
                  block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """Times and lengths only: nothing is shared, every block has an id of its own."""
    requests: list[TraceRequest] = []
    block, next_id, first_s = block_size or LENGTHS_BLOCK, 0, None
    for line in lines:
        at_s = within_span(line, "timestamp", first_s, 1000)
        first_s = at_s if first_s is None else first_s
        prompt = prompt_tokens(line, "input_length")
        num_blocks = prompt // block
        requests.append(TraceRequest(at_s, prompt, output_tokens(line, "output_length"),
                                     tuple(range(next_id, next_id + num_blocks))))
        next_id += max(1, num_blocks)
    return block, requests


def _read_sessions(lines: Iterator[dict[str, Any]], draw: random.Random,
                   block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """One session a line, ids local to it. Sessions start at random over an hour; their own pauses are kept."""
    requests: list[TraceRequest] = []
    own_block = block_size
    for line in lines:
        source_block = whole(line, "block_size", 1, BLOCK_SIZE_MAX)
        block = own_block = own_block or source_block
        if block_size is None and source_block != block:
            refuse("block_size", f"that of the lines before, {block} (or give --block-size)", source_block)
        starts_at, session = draw.uniform(0, SESSION_SPREAD_S), str(line["id"])
        ids: dict[int, int] = {}
        for at_s, entry in _flat(objects(line, "requests"), 0.0):
            length = prompt_tokens(entry, "in")
            local = block_runs(entry, "runs", length, source_block)
            prompt = scaled_prompt(length, source_block, block)
            full = tuple(ids.setdefault(one, _named(session, one)) for one in local[:prompt // block])
            requests.append(TraceRequest(starts_at + at_s, prompt, output_tokens(entry, "out"), full, session))
    return own_block or MOONCAKE_BLOCK, requests


def _flat(entries: list[dict[str, Any]], began_s: float, deep: int = 0) -> Iterator[tuple[float, dict[str, Any]]]:
    """A session's requests with those of its sub-agents put in; theirs count from the marker."""
    if deep > SUBAGENTS_DEEP_MAX:
        raise ValueError(f"requests of sub-agents are nested more than {SUBAGENTS_DEEP_MAX} deep")
    for entry in entries:
        at_s = began_s + offset_s(entry, "t")
        if entry.get("type") == "subagent":
            yield from _flat(objects(entry, "requests") if "requests" in entry else [], at_s, deep + 1)
        else:
            yield at_s, entry


def _read_conversations(lines: Iterator[dict[str, Any]], draw: random.Random,
                        block_size: int | None) -> tuple[int, list[TraceRequest]]:
    """Text: every assistant message is one request whose prompt is all that stands before it."""
    requests, block = [], block_size or TEXT_BLOCK
    for number, line in enumerate(lines):
        said: list[Message] = []
        at_s, session = draw.uniform(0, SESSION_SPREAD_S), str(line.get("id", number))
        for message in objects(line, "messages"):
            turn = Message(text(message["role"], "role"), _text_of(message))
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
        for turn in listed(line, "turns"):
            said.append(Message("user", text(turn, "turns")))
            requests.append(_text_request(said, answer, block, at_s=at_s, session=session))
            said.append(Message(ASSISTANT, answer))
            at_s += draw.expovariate(1 / 10.0)
    return block, requests


def _text_of(message: dict[str, Any]) -> str:
    """Parts of a content, and calls of tools, as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list | None):
        refuse("content", "text, a list of parts, or null", content)
    if not isinstance(calls, list | None):
        refuse("tool_calls", "a list, or null", calls)
    return (content if isinstance(content, str) else orjson.dumps(content).decode() if content else "") + (
        orjson.dumps(calls, option=orjson.OPT_SORT_KEYS).decode() if calls else "")


def _text_request(said: list[Message], answer: str, block: int, *, at_s: float, session: str) -> TraceRequest:
    """A quarter of a token a character; a block's id is the hash of its characters."""
    prompt = "".join(f"<{message.role}>{message.text}" for message in said)
    width = block * CHARACTERS_PER_TOKEN
    tokens, answer_tokens = (max(1, len(written) // CHARACTERS_PER_TOKEN) for written in (prompt, answer))
    if tokens > PROMPT_TOKENS_MAX or answer_tokens > OUTPUT_TOKENS_MAX:
        raise ValueError(f"messages make a prompt of {tokens} tokens and an answer of {answer_tokens}; at most "
                         f"{PROMPT_TOKENS_MAX} and {OUTPUT_TOKENS_MAX} are allowed")
    ids = tuple(_named(prompt[at:at + width], 0) for at in range(0, tokens // block * width, width))
    return TraceRequest(at_s, tokens, answer_tokens, ids, session, tuple(said), answer)


def _named(text: str, number: int) -> int:
    return xxh3_64_intdigest(text.encode(), number) >> 33


_READERS = {"mooncake": _read_mooncake, "lengths": _read_lengths, "sessions": _read_sessions,
            "conversations": _read_conversations, "questions": _read_questions}
