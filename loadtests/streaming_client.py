"""A client's stopwatch: one streamed chat completion, timed token by token.

Owns the reading of an SSE answer into instants and counts. Decides nothing about what is sent or compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import orjson


class AnswerError(Exception):
    """The endpoint answered with an error or broke off; the message is fit to show."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """`token_at_s`: seconds from the request to each chunk with text or token ids; the first of them is the TTFT."""

    token_at_s: tuple[float, ...]
    total_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    worker_id: str | None

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
    payload = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    started = time.perf_counter()
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=payload, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                raise AnswerError(f"{url} answered {response.status}: {(await response.text())[:300]}")
            return await _read(response, started)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AnswerError(f"{url} broke off: {error!r}") from error


async def _read(response: aiohttp.ClientResponse, started: float) -> TimedAnswer:
    token_at_s: list[float] = []
    pieces: list[str] = []
    usage: dict[str, object] = {}
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter() - started
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        chunk = orjson.loads(data)
        if "error" in chunk:
            raise AnswerError(f"the stream ended with an error: {chunk['error']}")
        choices = chunk.get("choices") or []
        text = "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)
        pieces.append(text)
        if text or any(choice.get("token_ids") for choice in choices):
            token_at_s.append(now)
        usage = chunk.get("usage") or usage
    if not done:
        raise AnswerError("the stream ended without [DONE]")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TimedAnswer(
        token_at_s=tuple(token_at_s),
        total_s=time.perf_counter() - started,
        text="".join(pieces),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(cached),
        completion_tokens=_count(usage.get("completion_tokens")),
        worker_id=response.headers.get("x-headstart-worker"),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
