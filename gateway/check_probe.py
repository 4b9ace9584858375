"""Sends one probe to an OpenAI-compatible endpoint and reports what the endpoint and a stopwatch said.

Owns the probe's text and its reading of the answer. Knows nothing of workers or verdicts (check.py does).
A probe streams, so that time to first token is the client's own, and asks for usage, so that cached tokens are told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import orjson

PROBE_TIMEOUT_S = 300.0
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
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EndpointError(f"{url} does not answer ({error}): is it running, and is this its address?") from error
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
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EndpointError(f"{url}/v1/chat/completions broke off ({error}): is the server running?") from error


async def _read_stream(response: aiohttp.ClientResponse, started: float) -> ProbeResult:
    ttft_s: float | None = None
    usage: dict[str, object] = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        chunk = orjson.loads(data)
        if "error" in chunk:
            raise EndpointError(f"the stream ended with an error: {chunk['error'].get('message', chunk['error'])}")
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
        predicted_tokens=int(matched) if matched is not None and matched.isdigit() else None,
        headers=dict(response.headers),
    )


def _has_token(choice: dict[str, object]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict) and any(delta.get(key) for key in ("content", "tool_calls", "reasoning_content")):
        return True
    return choice.get("finish_reason") is not None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _message(raw: bytes) -> str:
    try:
        parsed = orjson.loads(raw)
        return str(parsed["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
