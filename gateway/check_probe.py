"""Sends one probe to an OpenAI-compatible endpoint and reports what the endpoint and a stopwatch said.

Owns the probe's text and its reading of the answer. Knows nothing of workers or verdicts (check.py does).
A probe streams, so that time to first token is the client's own, and asks for usage, so that cached tokens are told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from worker.protocol.command_line import one_line

PROBE_TIMEOUT_S = 300.0
SILENCE_S = 60.0  # of a server, before it counts as one that does not answer
SHOWN_CHARACTERS = 200
PROBE_MAX_TOKENS = 4
PROBE_SECTIONS = 18  # about 900 tokens in the tokenizers of today's models


class EndpointError(Exception):
    """The endpoint cannot be used as it is; the message says why and what to do."""


class CallerMistake(EndpointError):
    """The endpoint may be fine: an argument of the command is not."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One answer: seconds to the first streamed token, and the token counts where the endpoint reports them."""

    ttft_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    worker_id: str | None
    predicted_tokens: int | None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def impossible(self) -> str | None:
        """What cannot be in its usage, if anything."""
        cached, prompt = self.cached_tokens or 0, self.prompt_tokens
        if cached >= 0 and (prompt is None or cached <= prompt):
            return None
        return f"its usage cannot be: {cached} cached of {'?' if prompt is None else prompt} prompt tokens"


def probe_messages(nonce: str, question: str) -> list[dict[str, str]]:
    """A long system prompt that nobody has sent before (the nonce comes first) and a short question."""
    rules = "\n".join(
        f"{number}. When section {number} of handbook {nonce} applies, name the section, quote its rule in one line, "
        f"and say which of the steps {number + 1} to {number + 3} follows."
        for number in range(1, PROBE_SECTIONS + 1)
    )
    system = f"Handbook {nonce}. You answer questions about it briefly.\n{rules}"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


async def fetch_json(session: aiohttp.ClientSession, url: str, *, token: str | None = None) -> tuple[int, object]:
    """GET a JSON document: (status, parsed body or None). Raises EndpointError when nothing answers."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(url, headers=headers) as response:
            raw = await response.read()
            status = response.status
    except TimeoutError as error:
        raise _too_late(url, session) from error
    except (aiohttp.ClientError, OSError) as error:
        reason = one_line(error)
        raise EndpointError(f"{url} does not answer ({reason}): is it running, and is this its address?") from error
    try:
        return status, orjson.loads(raw)
    except orjson.JSONDecodeError:
        return status, None


async def probe(
    session: aiohttp.ClientSession,
    url: str,
    *,
    model: str,
    messages: list[dict[str, str]],
    api_key: str | None = None,
) -> ProbeResult:
    """POST one streamed chat completion and read it to its end. Raises EndpointError on anything but a 200 stream."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": PROBE_MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    started = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", data=orjson.dumps(body), headers=headers) as response:
            if response.status != 200:
                reason = _message(await response.read())
                raise EndpointError(f"{url}/v1/chat/completions answered {response.status}: {reason}")
            return await _read_stream(response, started)
    except TimeoutError as error:
        raise _too_late(f"{url}/v1/chat/completions", session) from error
    except (aiohttp.ClientError, HttpProcessingError, OSError) as error:  # Http...: a line longer than aiohttp takes
        reason = one_line(error)
        raise EndpointError(f"{url}/v1/chat/completions broke off ({reason}): is the server running?") from error


def _too_late(address: str, session: aiohttp.ClientSession) -> EndpointError:
    silence_s, total_s = session.timeout.sock_read, session.timeout.total
    return EndpointError(
        f"{address} did not answer in time: it may be silent for {silence_s:g} s (--timeout) "
        f"and take {total_s:g} s in all; is a worker stuck, or still loading?"
    )


async def _read_stream(response: aiohttp.ClientResponse, started: float) -> ProbeResult:
    ttft_s: float | None = None
    usage: dict[str, object] = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        chunk = _chunk(data)
        if chunk.get("error") is not None:
            raise EndpointError(f"the stream ended with an error: {_reason(chunk, data)}")
        if ttft_s is None and any(_has_token(choice) for choice in chunk.get("choices") or []):
            ttft_s = time.perf_counter() - started
        usage = chunk.get("usage") or usage
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    matched = response.headers.get("x-headstart-matched-tokens")
    return ProbeResult(
        ttft_s=time.perf_counter() - started if ttft_s is None else ttft_s,
        prompt_tokens=_int(usage.get("prompt_tokens")),
        cached_tokens=_int(cached),
        worker_id=response.headers.get("x-headstart-worker"),
        predicted_tokens=int(matched) if matched is not None and matched.isascii() and matched.isdigit() else None,
        headers=dict(response.headers),
    )


def _chunk(data: bytes) -> dict[str, Any]:
    """One event's data, of the shape that the rest relies on."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        chunk = None
    if not (
        isinstance(chunk, dict)
        and isinstance(chunk.get("usage"), dict | None)
        and isinstance(chunk.get("choices"), list | None)
        and all(isinstance(choice, dict) for choice in chunk.get("choices") or [])
    ):
        shown = data[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        raise EndpointError(f"a chunk of the stream is not a chat completion's: {shown}")
    return chunk


def _has_token(choice: dict[str, object]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict) and any(delta.get(key) for key in ("content", "tool_calls", "reasoning_content")):
        return True
    return choice.get("finish_reason") is not None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _message(raw: bytes) -> str:
    try:
        return _reason(orjson.loads(raw), raw)
    except orjson.JSONDecodeError:
        return raw[:SHOWN_CHARACTERS].decode("utf-8", "replace")


def _reason(parsed: object, raw: bytes) -> str:
    """The message of an error in OpenAI's shape; of another, its text."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else raw[:SHOWN_CHARACTERS].decode("utf-8", "replace")
