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

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
SHOWN_CHARACTERS = 300


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
        raise AnswerError(f"{address} broke off: {error!r}", "broke off") from error


def _refusal(address: str, status: int, raw: bytes) -> AnswerError:
    try:
        code = orjson.loads(raw)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        code = None
    shown = raw.decode("utf-8", "replace")[:SHOWN_CHARACTERS]
    return AnswerError(f"{address} answered {status}: {shown}", f"{status} {code}" if code else str(status))


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
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise AnswerError(f"a chunk is not JSON: {data[:SHOWN_CHARACTERS]!r}", "bad chunk") from error
        if "error" in chunk:
            raise AnswerError(f"the stream ended with an error: {chunk['error']}", "error in the stream")
        choices = chunk.get("choices") or []
        text = "".join(map(_text_of, choices))
        pieces.append(text)
        if text or any(choice.get("token_ids") for choice in choices):
            token_at_s.append(now)
        usage = chunk.get("usage") or usage
    if not done:
        raise AnswerError("the stream ended without [DONE]", "no [DONE]")
    details = usage.get("prompt_tokens_details")
    return TimedAnswer(
        token_at_s=tuple(token_at_s),
        total_s=time.perf_counter() - started,
        text="".join(pieces),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else None),
        completion_tokens=_count(usage.get("completion_tokens")),
        worker_id=response.headers.get("x-headstart-worker"),
        matched_tokens=_header_count(response.headers.get("x-headstart-matched-tokens")),
        tells_usage=bool(usage),
    )


def _text_of(choice: dict[str, Any]) -> str:
    """Of a chat's chunk or a completion's."""
    delta = choice.get("delta")
    return str((delta.get("content") if isinstance(delta, dict) else choice.get("text")) or "")


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _header_count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
