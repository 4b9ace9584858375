"""A client's stopwatch: one streamed answer, timed token by token.

Owns the reading of an SSE answer into instants and counts. Decides nothing about what is sent or compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from worker.protocol.command_line import one_line

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
SHOWN_CHARACTERS = 300
KIND_CHARACTERS = 60


class AnswerError(Exception):
    """The endpoint answered with an error or broke off; the message is fit to show. `kind` groups what is alike: a
    status with the error's code, or how the stream ended."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """`token_at_s`: seconds from the request to each chunk with text or token ids; the first of them is the TTFT.
    Counts that the endpoint does not tell are 0, and then `tells_usage` is false."""

    token_at_s: tuple[float, ...]
    total_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    worker_id: str | None
    matched_tokens: int | None = None
    tells_usage: bool = True

    @property
    def ttft_s(self) -> float:
        return self.token_at_s[0] if self.token_at_s else self.total_s

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def seconds_per_token(self) -> float:
        """Mean time of a token after the first; 0 when there is only one."""
        if self.completion_tokens < 2 or len(self.token_at_s) < 2:
            return 0.0
        return (self.token_at_s[-1] - self.token_at_s[0]) / (self.completion_tokens - 1)


async def timed_chat(session: aiohttp.ClientSession, url: str, body: Mapping[str, object]) -> TimedAnswer:
    """POST {url}/v1/chat/completions with `body`, streamed with usage. Raises AnswerError unless it ends well."""
    return await timed_stream(session, url + CHAT_PATH, body)


async def timed_stream(session: aiohttp.ClientSession, address: str, body: Mapping[str, object],
                       headers: Mapping[str, str] | None = None) -> TimedAnswer:
    """POST `body` to a route that generates, streamed with usage. Raises AnswerError unless it ends well."""
    payload = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    started = time.perf_counter()
    try:
        async with session.post(address, data=payload,
                                headers={"Content-Type": "application/json", **(headers or {})}) as response:
            if response.status != 200:
                raise _refusal(address, response.status, await response.read())
            return await _read(response, started)
    except TimeoutError as error:
        raise AnswerError(f"{address} did not end in time", "timeout") from error
    except aiohttp.ClientConnectorError as error:
        raise AnswerError(f"{address} cannot be reached: {error}", "not connected") from error
    except (aiohttp.ClientError, OSError) as error:
        raise AnswerError(f"{address} broke off: {one_line(error)}", "broke off") from error
    except HttpProcessingError as error:   # a line longer than aiohttp takes
        raise AnswerError(f"{address}: {one_line(error)}", "bad chunk") from error


def _refusal(address: str, status: int, raw: bytes) -> AnswerError:
    try:
        code = orjson.loads(raw)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        code = None
    shown = raw.decode("utf-8", "replace")[:SHOWN_CHARACTERS]
    kind = f"{status} {code}"[:KIND_CHARACTERS] if code else str(status)
    return AnswerError(f"{address} answered {status}: {shown}", kind)


async def _read(response: aiohttp.ClientResponse, started: float) -> TimedAnswer:
    token_at_s: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter() - started
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        chunk = _chunk(data)
        if chunk.get("error") is not None:
            raise AnswerError(f"the stream ended with an error: {str(chunk['error'])[:SHOWN_CHARACTERS]}",
                              "error in the stream")
        choices = chunk.get("choices") or []
        text = "".join(_said(choice) or "" for choice in choices)
        pieces.append(text)
        if text or any(choice.get("token_ids") for choice in choices):
            token_at_s.append(now)
        usage = chunk.get("usage") or usage
    if not done:
        raise AnswerError("the stream ended without [DONE]", "no [DONE]")
    prompt_tokens, cached_tokens, completion_tokens = _counts(usage)
    return TimedAnswer(
        token_at_s=tuple(token_at_s),
        total_s=time.perf_counter() - started,
        text="".join(pieces),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        worker_id=response.headers.get("x-headstart-worker"),
        matched_tokens=_header_count(response.headers.get("x-headstart-matched-tokens")),
        tells_usage=bool(usage),
    )


def _chunk(data: bytes) -> dict[str, Any]:
    """One event's data, of the shape that the rest relies on."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        chunk = None
    if not (isinstance(chunk, dict) and isinstance(chunk.get("usage"), dict | None)
            and isinstance(chunk.get("choices"), list | None)
            and all(isinstance(choice, dict) and isinstance(_said(choice), str | None)
                    for choice in chunk.get("choices") or [])):
        raise AnswerError(f"a chunk is not a completion's: {data[:SHOWN_CHARACTERS].decode('utf-8', 'replace')}",
                          "bad chunk")
    return chunk


def _said(choice: dict[str, Any]) -> Any:
    """Of a chat's chunk or a completion's."""
    delta = choice.get("delta")
    return delta.get("content") if isinstance(delta, dict) else choice.get("text")


def _counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, of those cached, and of the answer; what is not told is 0."""
    details = usage.get("prompt_tokens_details")
    prompt, answer = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (details.get("cached_tokens") if isinstance(details, dict) else None) or 0
    if not all(type(count) is int for count in (prompt, cached, answer)) or answer < 0 or not 0 <= cached <= prompt:
        told = f"its usage cannot be: {cached} cached of {prompt} prompt tokens, {answer} of output"
        raise AnswerError(told[:SHOWN_CHARACTERS], "impossible usage")
    return prompt, cached, answer


def _header_count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
